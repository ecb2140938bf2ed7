{{/* Names and labels. */}}

{{- define "tandem.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "tandem.selector" . }}
{{- end }}

{{/* What never changes of a workload: selectors are immutable. Takes {root, component}, of a pool also {pool}. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
tandem-llm.io/pool: {{ .name }}
{{- end }}
{{- end }}

{{- define "tandem.name" -}}
{{ .root.Release.Name }}-{{ .component }}
{{- end }}

{{/* Image of the service's own code; `device` is cpu or cuda. Takes {root, device, image}; image may be empty. */}}
{{- define "tandem.image" -}}
{{- $tag := .root.Values.image.tag | default (printf "%s-%s" .root.Chart.AppVersion .device) -}}
{{- .image | default (printf "%s:%s" .root.Values.image.repository $tag) -}}
{{- end }}

{{/* Bytes of a quantity such as 64Gi. Takes {value, field}. */}}
{{- define "tandem.bytes" -}}
{{- $value := toString .value -}}
{{- if not (regexMatch "^[0-9]+(Ki|Mi|Gi|Ti)?$" $value) -}}
{{- fail (printf "%s: %s is not a number of bytes or of Ki, Mi, Gi or Ti" .field $value) -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+" $value | int64 -}}
{{- $factor := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul $number (get $factor (regexFind "[KMGT]i$" $value) | int64) -}}
{{- end }}

{{- define "tandem.redisUrl" -}}
redis://{{ .Release.Name }}-redis:6379/0
{{- end }}

{{/* name=host:port of the store nodes, in the order of their Pods. */}}
{{- define "tandem.stores" -}}
{{- $nodes := list -}}
{{- $name := printf "%s-kvstore" .Release.Name -}}
{{- if and (or .Values.kvstore.hostMemory .Values.kvstore.volume.enabled) (or (not .Key) .SharesStore) -}}
{{- range $number := until (int .Values.kvstore.replicas) -}}
{{- $nodes = append $nodes (printf "%s-%d=%s-%d.%s-nodes.%s.svc:50070" $name $number $name $number $name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- join "," $nodes -}}
{{- end }}

{{/* The router's mode by the pools' roles: "auto" or "collocated" where all are of that role, else "disaggregated". */}}
{{- define "tandem.mode" -}}
{{- $roles := list -}}
{{- range .Values.pools }}{{ $roles = append $roles .role }}{{ end -}}
{{- $all := uniq $roles | join "," -}}
{{- if has $all (list "auto" "collocated") -}}{{ $all }}{{- else -}}disaggregated{{- end -}}
{{- end }}

{{/* "yes" where collocated workers stand beside a prefill pool. */}}
{{- define "tandem.computesBeside" -}}
{{- $roles := list -}}
{{- range .Values.pools }}{{ $roles = append $roles .role }}{{ end -}}
{{- and (has "collocated" $roles) (has "prefill" $roles) | ternary "yes" "no" -}}
{{- end }}

{{/* cpu or cuda. Takes a pool. */}}
{{- define "tandem.device" -}}
{{- $limits := dig "resources" "limits" dict . -}}
{{- if .device -}}{{ .device }}
{{- else if or .dra (hasKey $limits "nvidia.com/gpu") (hasKey $limits "amd.com/gpu") -}}cuda
{{- else -}}cpu{{- end -}}
{{- end }}

{{/* A setting of a pool's workers, from extraArgs, the pool, its config or worker.config. Takes {root, pool, key, name}:
     `key` as in settings (kv_dtype), `name` as in values (kvDtype). Empty where neither is set. */}}
{{- define "tandem.poolSetting" -}}
{{- $flag := regexFind (printf "--%s[= ][^ ]+" (replace "_" "-" .key)) (join " " .pool.extraArgs) -}}
{{- $config := mergeOverwrite (deepCopy .root.Values.worker.config) (.pool.config | default dict) -}}
{{- if $flag -}}{{ regexReplaceAll "^[^= ]+[= ]" $flag "" }}
{{- else if get .pool .name -}}{{ get .pool .name }}
{{- else if hasKey $config .key -}}{{ get $config .key }}
{{- end -}}
{{- end }}

{{/* What two workers must agree in to exchange blocks, as one word a setting. Takes {root, pool}. */}}
{{- define "tandem.layout" -}}
dtype={{ include "tandem.poolSetting" (merge (dict "key" "dtype" "name" "dtype") .) | default "auto" -}}
,quantization={{ include "tandem.poolSetting" (merge (dict "key" "quantization" "name" "quantization") .) | default "auto" -}}
,kvDtype={{ include "tandem.poolSetting" (merge (dict "key" "kv_dtype" "name" "kvDtype") .) | default "auto" -}}
,blockSize={{ include "tandem.poolSetting" (merge (dict "key" "block_size" "name" "blockSize") .) | default "16" -}}
,deterministic={{ include "tandem.poolSetting" (merge (dict "key" "deterministic" "name" "") .) | default "false" -}}
,prefill_kv_dtype={{ include "tandem.poolSetting" (merge (dict "key" "prefill_kv_dtype" "name" "") .) | default "same" -}}
{{- end }}

{{/* Label of the workers that may be used together, and part of the router's selector: one layout, one model, and one
version of the sampler, shared/seeds.py's. */}}
{{- define "tandem.layoutLabel" -}}
{{- printf "%s,sampler=2,%s" (list .Key .Values.model.uri | compact | join "=") (include "tandem.layout" (dict "root" . "pool" (first .Values.pools))) | sha256sum | trunc 12 -}}
{{- end }}

{{- define "tandem.workerSelector" -}}
app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=worker,tandem-llm.io/layout={{ include "tandem.layoutLabel" . }}
{{- end }}
