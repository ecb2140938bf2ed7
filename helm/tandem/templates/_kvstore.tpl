{{/* The KV store's container. */}}

{{- define "tandem.kvstore.env" -}}
{{- include "tandem.env" (dict "root" . "prefix" "KVSTORE") }}
- name: TANDEM_KVSTORE_REDIS_URL
{{- if .Values.redis.enabled }}
  value: {{ include "tandem.redisUrl" . }}
{{- else if .Values.redis.external.url }}
  value: {{ .Values.redis.external.url | quote }}
{{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.existingSecret }}
      key: {{ .Values.redis.external.existingSecretKey }}
{{- end }}
{{- with .Values.kvstore.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes {root, config}. */}}
{{- define "tandem.kvstore.mounts" -}}
{{- include "tandem.mounts" . }}
- name: shm
  mountPath: /dev/shm
{{- if .root.Values.kvstore.volume.enabled }}
- name: blocks
  mountPath: /var/lib/tandem
{{- end }}
{{- if .root.Values.redis.external.caSecret }}
- name: redis-ca
  mountPath: /etc/tandem/redis-ca
  readOnly: true
{{- end }}
{{- end }}
