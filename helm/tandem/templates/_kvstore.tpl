{{/* The KV store's container. */}}

{{- define "tandem.kvstore.env" -}}
{{- include "tandem.env" (dict "root" . "prefix" "KVSTORE") }}
- name: TANDEM_KVSTORE_REDIS_URL
{{- if .Values.redis.enabled }}
  value: {{ include "tandem.redisUrl" . }}
{{- else }}
{{- with .Values.redis.external }}
{{- if .url }}
  value: {{ .url | quote }}
{{- end }}
{{- if and .url .existingSecret }}
- name: TANDEM_KVSTORE_REDIS_PASSWORD
{{- end }}
{{- if .existingSecret }}
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .existingSecretKey | default (empty .url | ternary "url" "password") }}
{{- end }}
{{- end }}
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

{{/* Of the service and of its preflight. Takes {root, config}. */}}
{{- define "tandem.kvstore.args" -}}
{{- if .config }}
- --config=/etc/tandem/config/kvstore.yaml
{{- end }}
- --bind={{ .root.Values.bindAddress }}:50070
- --metrics={{ .root.Values.bindAddress }}:9090
{{- if or .root.Values.kvstore.hostMemory .root.Values.kvstore.volume.enabled }}
- --name=$(POD_NAME)
{{- end }}
{{- with .root.Values.kvstore.hostMemory }}
- --host-bytes={{ include "tandem.bytes" (dict "value" . "field" "kvstore.hostMemory") }}
{{- end }}
{{- if .root.Values.kvstore.volume.enabled }}
- --disk-folder=/var/lib/tandem/blocks
- --disk-bytes={{ div (mul 9 (include "tandem.bytes" (dict "value" .root.Values.kvstore.volume.size "field" "kvstore.volume.size") | int64)) 10 }}
{{- if .root.Values.kvstore.volume.sharedClaim }}
- --disk-shared=true
{{- end }}
{{- end }}
{{- if .root.Values.redis.external.cluster }}
- --redis-cluster=true
{{- end }}
- --log-format={{ .root.Values.logFormat }}
{{- with include "tandem.tracesArgs" .root | trim }}{{ . | nindent 0 }}{{ end }}
{{- with include "tandem.tlsArgs" .root | trim }}{{ . | nindent 0 }}{{ end }}
{{- range .root.Values.kvstore.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
