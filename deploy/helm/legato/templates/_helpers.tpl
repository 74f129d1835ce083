{{- define "legato.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "legato.labels" -}}
app.kubernetes.io/name: legato
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "legato.selector" -}}
app.kubernetes.io/name: legato
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "legato.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "legato.routeSecret" -}}
{{ .Values.routeKey.existingSecret | default (printf "%s-route" (include "legato.name" .)) }}
{{- end -}}

{{- define "legato.clusterSecret" -}}
{{ .Values.nodes.existingSecret | default (printf "%s-cluster" (include "legato.name" .)) }}
{{- end -}}

{{- define "legato.scaleTarget" -}}
{{- $group := eq .Values.replicas.kind "LeaderWorkerSet" | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" -}}
{apiVersion: {{ $group }}, kind: {{ .Values.replicas.kind }}, name: {{ include "legato.name" . }}-replicas}
{{- end -}}

{{- define "legato.routeKeyEnv" -}}
- name: ROUTE_KEY
  valueFrom: {secretKeyRef: {name: {{ include "legato.routeSecret" . }}, key: route-key}}
{{- end -}}
