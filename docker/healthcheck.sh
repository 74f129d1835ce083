#!/bin/sh
# Docker's health check. Port and certificate may be arguments of the launcher, which is process 1.
port=${PORT:-3000} scheme=http previous=
[ -z "${SSL_CERTFILE}" ] || scheme=https
tr '\0' '\n' <"${1:-/proc/1/cmdline}" | {
    while IFS= read -r word; do
        case "${previous}" in
            --port | -p) port=${word} ;;
        esac
        case "${word}" in
            --port=*) port=${word#--port=} ;;
            -p?*) port=${word#-p} ;;
            --ssl-certfile*) scheme=https ;;
        esac
        previous=${word}
    done
    # Vertex AI's variable has precedence. The certificate is for another name than 127.0.0.1.
    exec curl -fsk "${scheme}://127.0.0.1:${AIP_HTTP_PORT:-${port}}/health"
}
