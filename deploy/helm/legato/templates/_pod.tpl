{{- /* The pod of a server. component: `replica` answers HTTP, `node` is another machine of a replica's group. */ -}}
{{- define "legato.pod" -}}
metadata:
  labels:
    {{- include "legato.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  terminationGracePeriodSeconds: {{ add .root.Values.replicas.gracefulTerminationTimeout 20 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: legato
      image: {{ include "legato.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        - --model-id={{ .root.Values.modelId }}
        - --port=80
        - --prometheus-port=9000
        - --graceful-termination-timeout={{ .root.Values.replicas.gracefulTerminationTimeout }}
        {{- if .root.Values.apiKeys.existingSecret }}
        - --api-key-file=/etc/legato/api-keys
        {{- end }}
        {{- range .root.Values.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "legato.routeKeyEnv" .root | nindent 8 }}
        {{- if eq .root.Values.replicas.kind "LeaderWorkerSet" }}
        # Rank and address come from LeaderWorkerSet itself.
        - name: CLUSTER_KEY
          valueFrom: {secretKeyRef: {name: {{ include "legato.clusterSecret" .root }}, key: cluster-key}}
        - {name: NUM_SHARD, value: {{ .root.Values.nodes.shards | quote }}}
        - {name: PIPELINE_PARALLEL_SIZE, value: {{ .root.Values.nodes.stages | quote }}}
        {{- end }}
        {{- with .root.Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if eq .component "replica" }}
      ports:
        - {name: http, containerPort: 80}
        - {name: metrics, containerPort: 9000}
      startupProbe:
        httpGet: {path: /startupz, port: http}
        periodSeconds: 10
        failureThreshold: {{ .root.Values.replicas.startupFailureThreshold }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: /livez, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
      {{- end }}
      {{- with .root.Values.replicas.resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: shm, mountPath: /dev/shm}
        {{- if .root.Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/legato, readOnly: true}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.replicas.sharedMemory }}}
    {{- if .root.Values.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ .root.Values.apiKeys.existingSecret }}}
    {{- end }}
    {{- if .root.Values.persistence.existingClaim }}
    - name: data
      persistentVolumeClaim: {claimName: {{ .root.Values.persistence.existingClaim }}}
    {{- else if not (and .root.Values.persistence.enabled (eq .root.Values.replicas.kind "StatefulSet")) }}
    - name: data
      emptyDir: {}
    {{- end }}
  {{- with .root.Values.replicas.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.replicas.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.replicas.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
