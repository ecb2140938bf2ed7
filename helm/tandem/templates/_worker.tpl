{{/* A pool's Pods. Each takes {root, pool}. */}}

{{- define "tandem.worker.labels" -}}
{{- include "tandem.labels" (dict "root" .root "component" "worker" "pool" .pool) }}
tandem-llm.io/role: {{ .pool.role }}
{{- end }}

{{/* Pods have no label of the chart's version: another chart alone replaces none. */}}
{{- define "tandem.worker.podLabels" -}}
{{- include "tandem.selector" (dict "root" .root "component" "worker" "pool" .pool) }}
tandem-llm.io/role: {{ .pool.role }}
{{- end }}

{{/* Labels for the place of the Pods, from the pool; the router reads them from the Pods. */}}
{{- define "tandem.worker.topology" -}}
{{- with .pool.topology }}
{{- with .zone }}
topology.kubernetes.io/zone: {{ . | quote }}
{{- end }}
{{- with .rack }}
tandem-llm.io/rack: {{ . | quote }}
{{- end }}
{{- with .nvlinkDomain }}
tandem-llm.io/nvlink-domain: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.worker.config" -}}
{{- $config := mergeOverwrite (deepCopy .root.Values.worker.config) (deepCopy (.pool.config | default dict)) -}}
{{- if $config }}{{ $config | toYaml }}{{ end -}}
{{- end }}

{{/* Of the service, and of the preflight that checks what they need. Takes {root, pool, config}. */}}
{{- define "tandem.worker.args" -}}
{{- if .config }}
- --config=/etc/tandem/config/{{ .config }}
{{- end }}
- --name=$(POD_NAME)
- --bind={{ .root.Values.bindAddress }}:50061
- --metrics={{ .root.Values.bindAddress }}:9090
- --model={{ include "tandem.model.folder" .root }}
- --device={{ include "tandem.device" .pool }}
{{- with .pool.dtype }}
- --dtype={{ . }}
{{- end }}
{{- with .pool.quantization }}
- --quantization={{ . }}
{{- end }}
{{- with .pool.kvDtype }}
- --kv-dtype={{ . }}
{{- end }}
{{- range $flag, $degree := dict "tp" (dig "parallelism" "tensor" 1 .pool) "pp" (dig "parallelism" "pipeline" 1 .pool) "ep" (dig "parallelism" "expert" 1 .pool) }}
{{- if gt (int $degree) 1 }}
- --{{ $flag }}={{ $degree }}
{{- end }}
{{- end }}
{{- with .pool.blockSize }}
- --block-size={{ . }}
{{- end }}
- --kvstore={{ .root.Release.Name }}-kvstore.{{ .root.Release.Namespace }}.svc:50070
{{- with include "tandem.stores" .root }}
- --store={{ . }}
{{- end }}
- --log-format={{ .root.Values.logFormat }}
{{- with include "tandem.tracesArgs" .root | trim }}{{ . | nindent 0 }}{{ end }}
- --drain-timeout-s={{ .root.Values.worker.drainTimeoutSeconds }}
{{- with include "tandem.tlsArgs" .root | trim }}{{ . | nindent 0 }}{{ end }}
{{- range .pool.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Of a service whose group is over several Nodes; the set's controller names the leader and the index of this Pod. Takes a pool. */}}
{{- define "tandem.worker.groupArgs" -}}
{{- $hosts := include "tandem.worker.hosts" . | int -}}
{{- if gt $hosts 1 }}
- --group-hosts={{ $hosts }}
- --group-leader=$(LWS_LEADER_ADDRESS):50062
- --group-host-index=$(LWS_WORKER_INDEX)
- --group-address=$(POD_IP)
{{- end }}
{{- end }}

{{/* Processes of one worker. Takes a pool. */}}
{{- define "tandem.worker.ranks" -}}
{{- mul (int (dig "parallelism" "tensor" 1 .)) (int (dig "parallelism" "pipeline" 1 .)) -}}
{{- end }}

{{/* Nodes that they need. Takes a pool. */}}
{{- define "tandem.worker.hosts" -}}
{{- $ranks := include "tandem.worker.ranks" . | int -}}
{{- div (sub (add $ranks (.devicesPerNode | default $ranks)) 1) (.devicesPerNode | default $ranks) -}}
{{- end }}

{{/* `ranks` times a quantity such as 500m, 1.5 or 4Gi. Takes {quantity, ranks, field}. */}}
{{- define "tandem.times" -}}
{{- $quantity := toString .quantity -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?$" $quantity) -}}
{{- fail (printf "%s: %s cannot be multiplied by the ranks of a worker; write a number such as 500m, 1.5 or 4Gi" .field $quantity) -}}
{{- end -}}
{{- $number := regexFind "^[0-9.]+" $quantity -}}
{{- $unit := trimPrefix $number $quantity -}}
{{- if contains "." $number }}{{ printf "%.3f" (mulf $number .ranks) }}{{ else }}{{ mul (int64 $number) .ranks }}{{ end }}{{ $unit -}}
{{- end }}

{{/* Of all ranks in a Pod: what the values say of cores and memory is one rank's. Devices are the worker's. */}}
{{- define "tandem.worker.resources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- $ranks := div (include "tandem.worker.ranks" .pool) (include "tandem.worker.hosts" .pool) | int -}}
{{- if gt $ranks 1 -}}
{{- $name := .pool.name -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $resource, $quantity := (get $resources $kind | default dict) -}}
{{- if regexMatch "^(cpu|memory|ephemeral-storage|hugepages-.*)$" $resource -}}
{{- $field := printf "resources.%s.%s of pool %s" $kind $resource $name -}}
{{- $_ := set (get $resources $kind) $resource (include "tandem.times" (dict "quantity" $quantity "ranks" $ranks "field" $field)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .pool.rdma -}}
{{- $_ := set $resources "limits" (merge (dict .resource (.count | default 1)) ($resources.limits | default dict)) -}}
{{- end -}}
{{- if .pool.dra -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpu")) -}}
{{- end -}}
{{- if $resources }}{{ toYaml $resources }}{{ else }}{}{{ end -}}
{{- end }}

{{- define "tandem.worker.env" -}}
{{- include "tandem.env" (dict "root" .root "prefix" "WORKER") }}
{{- range $name, $value := mergeOverwrite dict .root.Values.worker.ucx (.pool.ucx | default dict) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with concat .root.Values.worker.env (.pool.env | default list) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.worker.mounts" -}}
{{- include "tandem.worker.ownMounts" . }}
{{- include "tandem.model.mounts" .root }}
{{- end }}

{{/* All but the model's. */}}
{{- define "tandem.worker.ownMounts" -}}
{{- include "tandem.mounts" . }}
- name: shm
  mountPath: /dev/shm
{{- with concat .root.Values.worker.extraVolumeMounts (.pool.extraVolumeMounts | default list) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The pool's own affinity; for a decode pool the wish to stand near the prefill workers is added. */}}
{{- define "tandem.worker.affinity" -}}
{{- $affinity := deepCopy (.pool.affinity | default dict) -}}
{{- if and (eq .pool.role "decode") (not $affinity.podAffinity) .root.Values.worker.nearKeys -}}
{{- $selector := dict "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/component" "worker" "tandem-llm.io/role" "prefill" -}}
{{- $labels := dict "matchLabels" $selector -}}
{{- if .root.Key -}}
{{- $own := list -}}
{{- range .root.Values.pools }}{{ $own = append $own .name }}{{ end -}}
{{- $_ := set $labels "matchExpressions" (list (dict "key" "tandem-llm.io/pool" "operator" "In" "values" $own)) -}}
{{- end -}}
{{- $terms := list -}}
{{- range $i, $key := .root.Values.worker.nearKeys -}}
{{- $term := dict "topologyKey" $key "labelSelector" $labels -}}
{{- $terms = append $terms (dict "weight" (max 1 (sub 100 (mul 20 $i))) "podAffinityTerm" $term) -}}
{{- end -}}
{{- $_ := set $affinity "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $terms) -}}
{{- end -}}
{{- if $affinity }}
affinity:
  {{- toYaml $affinity | nindent 2 }}
{{- end }}
{{- end }}
