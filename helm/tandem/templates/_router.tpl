{{/* The router's container. Takes {root, config}. */}}

{{- define "tandem.router.config" -}}
{{- $config := deepCopy .Values.router.config -}}
{{- include "tandem.models" . -}}
{{- range $root := .Models -}}
{{- if eq (include "tandem.computesBeside" $root) "yes" -}}
{{/* Collocated workers beside a prefill pool compute the prompts that would wait longer for it. */}}
{{- $_ := set $config "placement" (merge ($config.placement | default dict) (dict "prefill_here_max_tokens" 1048576)) -}}
{{- end -}}
{{- if $root.Key -}}
{{- $entry := include "tandem.models.entry" $root | fromYaml -}}
{{- $_ := set $config "models" (mergeOverwrite ($config.models | default dict) (dict $root.Values.model.servedName $entry)) -}}
{{- end -}}
{{- end -}}
{{- if $config }}{{ $config | toYaml }}{{ end -}}
{{- end }}

{{- define "tandem.router.args" -}}
{{- $root := .root -}}
{{- if .config }}
- --config=/etc/tandem/config/{{ .config }}
{{- end }}
- --name=$(POD_NAME)
- --http={{ $root.Values.bindAddress }}:8000
- --grpc={{ $root.Values.bindAddress }}:50051
- --model={{ include "tandem.model.folder" $root }}
- --served-model-name={{ include "tandem.model.servedName" $root }}
- --mode={{ include "tandem.mode" $root }}
- --discovery=kubernetes
- --kubernetes.namespace=$(POD_NAMESPACE)
- --kubernetes.selector={{ include "tandem.workerSelector" $root }}
- --kvstore={{ $root.Release.Name }}-kvstore.{{ $root.Release.Namespace }}.svc:50070
{{- with include "tandem.stores" $root }}
- --stores={{ . }}
{{- end }}
- --log-format={{ $root.Values.logFormat }}
{{- with include "tandem.tracesArgs" $root | trim }}{{ . | nindent 0 }}{{ end }}
{{- if $root.Values.traces.endpoint }}
- --traces.sample={{ $root.Values.traces.sample }}
{{- end }}
- --drain-timeout-s={{ $root.Values.router.drainTimeoutSeconds }}
{{- with include "tandem.tlsArgs" $root | trim }}{{ . | nindent 0 }}{{ end }}
{{- if $root.Values.tls.edge.existingSecret }}
- --edge.tls.cert=/etc/tandem/edge-tls/tls.crt
- --edge.tls.key=/etc/tandem/edge-tls/tls.key
{{- end }}
{{- with include "tandem.gateway.args" $root | trim }}{{ . | nindent 0 }}{{ end }}
{{- range $root.Values.router.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "tandem.router.env" -}}
{{- include "tandem.env" (dict "root" . "prefix" "ROUTER") }}
{{- with .Values.apiKeys }}
{{- if .existingSecret }}
- name: TANDEM_ROUTER_EDGE__API_KEYS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- if .adminKey }}
- name: TANDEM_ROUTER_EDGE__ADMIN_KEYS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .adminKey }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.router.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.router.mounts" -}}
{{- include "tandem.mounts" . }}
{{- if .root.Values.tls.edge.existingSecret }}
- name: edge-tls
  mountPath: /etc/tandem/edge-tls
  readOnly: true
{{- end }}
{{- range $model := .root.Models }}
{{- include "tandem.model.mounts" $model }}
{{- end }}
{{- with .root.Values.worker.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
