{{/* What the schema cannot say: contradictions between values. Each refusal begins with the value's path. */}}

{{- define "tandem.checks" -}}
{{- include "tandem.models" . -}}
{{- range $root := .Models -}}
{{- include "tandem.checks.pools" $root -}}
{{- include "tandem.checks.roles" $root -}}
{{- include "tandem.checks.layouts" $root -}}
{{- include "tandem.checks.model" $root -}}
{{- end -}}
{{- include "tandem.checks.models" . -}}
{{- include "tandem.checks.redis" . -}}
{{- include "tandem.checks.sizes" . -}}
{{- end }}

{{- define "tandem.checks.pools" -}}
{{- $names := list -}}
{{- range $i, $pool := .Values.pools -}}
  {{- $at := printf "%spools[%d]" $.In $i -}}
  {{- if has .name $names -}}
    {{- fail (printf "%s.name: %s is the name of another pool too; each needs a name of its own" $at .name) -}}
  {{- end -}}
  {{- if has .name (list "router" "kvstore" "redis" "planner" "gateway" "nodes") -}}
    {{- fail (printf "%s.name: %s is the name of another part of the release" $at .name) -}}
  {{- end -}}
  {{- $names = append $names .name -}}
  {{- $ranks := include "tandem.worker.ranks" . | int -}}
  {{- $tensor := int (dig "parallelism" "tensor" 1 .) -}}
  {{- $expert := int (dig "parallelism" "expert" 1 .) -}}
  {{- if ne (mod $tensor $expert) 0 -}}
    {{- fail (printf "%s.parallelism.expert: %d must divide parallelism.tensor, which is %d" $at $expert $tensor) -}}
  {{- end -}}
  {{- if gt $ranks 16 -}}
    {{- fail (printf "%s.parallelism: %d ranks, and a worker has at most 16" $at $ranks) -}}
  {{- end -}}
  {{- $hosts := include "tandem.worker.hosts" . | int -}}
  {{- if gt $hosts 1 -}}
    {{- if mod $ranks (int .devicesPerNode) -}}
      {{- fail (printf "%s.parallelism: %d ranks, which %d devicesPerNode do not divide" $at $ranks (int .devicesPerNode)) -}}
    {{- end -}}
    {{- if eq (include "tandem.device" .) "cuda" -}}
      {{- fail (printf "%s.parallelism: %d ranks over %d Nodes (devicesPerNode is %d): GPUs of several Nodes have not been tried together; groups over Nodes are for device: cpu" $at $ranks $hosts (int .devicesPerNode)) -}}
    {{- end -}}
    {{- if and $.Values.planner.enabled (has .name (splitList "," (include "tandem.planner.pools" $))) -}}
      {{- fail (printf "%s.parallelism: %d ranks over %d Nodes, and planner.enabled: the planner scales Deployments" $at $ranks $hosts) -}}
    {{- end -}}
    {{- $encryption := include "tandem.poolSetting" (dict "root" $ "pool" . "key" "block_encryption" "name" "") | trim | default "none" -}}
    {{- if ne $encryption "none" -}}
      {{- fail (printf "%s.config.block_encryption: %s, and %d ranks over %d Nodes, between which nothing is encrypted; set none" $at $encryption $ranks $hosts) -}}
    {{- end -}}
  {{- end -}}
  {{- $device := include "tandem.device" . -}}
  {{- $limits := dig "resources" "limits" dict . -}}
  {{- if and (eq $device "cpu") (or .dra (hasKey $limits "nvidia.com/gpu") (hasKey $limits "amd.com/gpu")) -}}
    {{- fail (printf "%s.device: cpu, but the pool asks for a GPU in resources.limits or dra" $at) -}}
  {{- end -}}
  {{- range $vendor := list "nvidia.com/gpu" "amd.com/gpu" -}}
    {{- $gpus := int (get $limits $vendor) -}}
    {{- $inPod := div $ranks $hosts | int -}}
    {{- if and (gt $gpus 0) (ne $gpus $inPod) -}}
      {{- fail (printf "%s.resources.limits: %s: %d, and a worker's Pod has %d processes of one GPU each: set that, or parallelism; for more of the same raise replicas" $at $vendor $gpus $inPod) -}}
    {{- end -}}
    {{- if and $pool.dra (hasKey $limits $vendor) -}}
      {{- fail (printf "%s.dra: the pool asks for a GPU in resources.limits (%s) too; choose one" $at $vendor) -}}
    {{- end -}}
  {{- end -}}
  {{- $ways := list (dict "key" "adapters") (dict "key" "adapter_folders") -}}
  {{- $adapters := "" -}}
  {{- range $ways }}{{ $adapters = print $adapters (include "tandem.poolSetting" (dict "root" $ "pool" $pool "key" .key "name" "") | trim) }}{{ end -}}
  {{- $memory := dig "limits" "memory" "" $pool.resources -}}
  {{- if and $adapters $memory (eq $device "cpu") (regexMatch "^[0-9]+(Ki|Mi|Gi|Ti)?$" (toString $memory)) -}}
    {{- $kept := include "tandem.poolSetting" (dict "root" $ "pool" $pool "key" "adapter_bytes" "name" "") | trim | default "1073741824" | float64 | int64 -}}
    {{- $copies := include "tandem.poolSetting" (dict "root" $ "pool" $pool "key" "adapter_host_bytes" "name" "") | trim | default "536870912" | float64 | int64 -}}
    {{- $kept = add $kept $copies -}}
    {{- $whole := mul $ranks (include "tandem.bytes" (dict "value" $memory "field" "resources.limits.memory") | int64) -}}
    {{- if ge $kept $whole -}}
      {{- fail (printf "%s.resources.limits.memory: %s, and %d bytes of it are kept for adapters (config.adapter_bytes, adapter_host_bytes) beside the weights" $at (toString $memory) $kept) -}}
    {{- end -}}
  {{- end -}}
  {{- range $flag := list "name" "bind" "model" "metrics" "kvstore" "store" "device" "drain-timeout-s" "tp" "pp" "ep" "group-hosts" "group-leader" "group-host-index" "group-address" -}}
    {{- if regexMatch (printf "(^| )--%s([= ]|$)" $flag) (join " " $pool.extraArgs) -}}
      {{- fail (printf "%s.extraArgs: --%s is set by the chart" $at $flag) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{- define "tandem.checks.roles" -}}
{{- $roles := list -}}
{{- range .Values.pools }}{{ $roles = append $roles .role }}{{ end -}}
{{- range $i, $pool := .Values.pools -}}
  {{- if and (has "auto" $roles) (ne $pool.role "auto") -}}
    {{- fail (printf "%spools[%d].role: %s, and another pool has role: auto, whose router decides for each request which worker prefills and which decodes; make all pools auto, or none" $.In $i $pool.role) -}}
  {{- end -}}
{{- end -}}
{{- if not (or (has "prefill" $roles) (has "collocated" $roles) (has "auto" $roles)) -}}
  {{- fail (printf "%spools: none can prefill; add one with role: prefill or collocated, or make all of them auto" .In) -}}
{{- end -}}
{{- if not (or (has "decode" $roles) (has "collocated" $roles) (has "auto" $roles)) -}}
  {{- fail (printf "%spools: none can decode; add one with role: decode or collocated, or make all of them auto" .In) -}}
{{- end -}}
{{- if and (has "decode" $roles) (has "collocated" $roles) -}}
  {{- fail (printf "%spools: roles decode and collocated exclude each other: a router lets all of its decode workers compute prompts, or none; make all of them one role" .In) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checks.layouts" -}}
{{- $first := include "tandem.layout" (dict "root" . "pool" (first .Values.pools)) -}}
{{- range $i, $pool := .Values.pools -}}
  {{- $layout := include "tandem.layout" (dict "root" $ "pool" .) -}}
  {{- range $part := splitList "," $layout -}}
    {{- if not (has $part (splitList "," $first)) -}}
      {{- fail (printf "%spools[%d].%s: pools that exchange blocks need one layout, but %s has %s and %s has %s" $.In $i (first (splitList "=" $part)) $pool.name $layout (first $.Values.pools).name $first) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* Between models. */}}
{{- define "tandem.checks.models" -}}
{{- $pools := dict -}}
{{- $names := dict -}}
{{- $beside := "" -}}
{{- $plain := "" -}}
{{- range $root := .Models -}}
  {{- if has $root.Key (list "router" "kvstore" "redis" "planner" "gateway") -}}
    {{- fail (printf "%s: %s is the name of another part of the release" $root.Entry $root.Key) -}}
  {{- end -}}
  {{- range .Values.pools -}}
    {{- with get $pools .name -}}
      {{- fail (printf "%spools: the release has two pools with the name %s, the other in %spools" $root.In . (get $pools (printf "%s/in" .))) -}}
    {{- end -}}
    {{- $_ := set $pools .name .name -}}
    {{- $_ := set $pools (printf "%s/in" .name) $root.In -}}
    {{- if eq .role "decode" }}{{ $plain = $root.Entry }}{{ end -}}
  {{- end -}}
  {{- $name := include "tandem.model.servedName" $root -}}
  {{- with get $names $name -}}
    {{- fail (printf "%s.servedName: %s is the name of %s too" $root.Entry $name .) -}}
  {{- end -}}
  {{- $_ := set $names $name $root.Entry -}}
  {{- if eq (include "tandem.computesBeside" $root) "yes" }}{{ $beside = $root.Entry }}{{ end -}}
  {{- if and $root.Key $root.SharesStore (not (include "tandem.stores" $root)) -}}
    {{- fail (printf "%s.sharesStore: there are no store nodes; set kvstore.hostMemory or kvstore.volume" $root.Entry) -}}
  {{- end -}}
{{- end -}}
{{- if and $beside $plain -}}
  {{- fail (printf "models: %s has collocated workers beside a prefill pool, and %s a decode pool: a router lets the decode workers of all its models compute prompts, or none" $beside $plain) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checks.redis" -}}
{{- with .Values.redis -}}
  {{- $external := or .external.url .external.existingSecret -}}
  {{- if and .enabled $external -}}
    {{- fail "redis.enabled: true, and redis.external is given too; set redis.enabled: false to use your own server" -}}
  {{- end -}}
  {{- if not (or .enabled $external) -}}
    {{- fail "redis: set redis.enabled: true for a bundled server, or redis.external.url or redis.external.existingSecret for your own" -}}
  {{- end -}}
  {{- if and .external.existingSecret (regexMatch "://[^/@]*:[^@]+@|[?&]password=" .external.url) -}}
    {{- fail "redis.external.existingSecret: it holds the password, and redis.external.url names one too; choose one" -}}
  {{- end -}}
  {{- if and .enabled (or .external.cluster .external.caSecret) -}}
    {{- fail "redis.external: cluster and caSecret say something about your own server, but redis.enabled is true" -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{- define "tandem.checks.model" -}}
{{- $scheme := include "tandem.model.scheme" . -}}
{{- $fetched := has $scheme (list "hf" "s3") -}}
{{- with .Values.model -}}
  {{- if and $fetched (not .size) -}}
    {{- fail (printf "%s.size: %s:// needs the room for the model's files, such as 40Gi" $.Entry $scheme) -}}
  {{- end -}}
  {{- range $key := list "size" "storageClassName" "secret" -}}
    {{- if and (not $fetched) (get $.Values.model $key) -}}
      {{- fail (printf "%s.%s: is for hf:// and s3:// alone; %s is not fetched into the Pod" $.Entry $key $.Values.model.uri) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq $scheme "s3") (not .downloaderImage) -}}
    {{- fail (printf "%s.downloaderImage: s3:// needs an image with the command aws; Tandem's own has none" $.Entry) -}}
  {{- end -}}
  {{- if and (ne $scheme "s3") .downloaderImage -}}
    {{- fail (printf "%s.downloaderImage: is for s3:// alone" $.Entry) -}}
  {{- end -}}
{{- end -}}
{{- if and (eq $scheme "oci") (semverCompare "<1.31-0" .Capabilities.KubeVersion.Version) -}}
  {{- fail (printf "%s.uri: oci:// needs Kubernetes 1.31 or later with image volumes; this is %s" .Entry .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end }}

{{- define "tandem.checks.sizes" -}}
{{- with .Values.kvstore.hostMemory -}}
  {{- $host := include "tandem.bytes" (dict "value" . "field" "kvstore.hostMemory") | int64 -}}
  {{- with dig "resources" "limits" "memory" "" $.Values.kvstore -}}
    {{- if ge $host (include "tandem.bytes" (dict "value" . "field" "kvstore.resources.limits.memory") | int64) -}}
      {{- fail (printf "kvstore.hostMemory: %s does not fit kvstore.resources.limits.memory: %s, which the process needs part of" $.Values.kvstore.hostMemory .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.kvstore.volume -}}
  {{- if and .sharedClaim .storageClassName -}}
    {{- fail "kvstore.volume.storageClassName: is for a volume of each node; kvstore.volume.sharedClaim is a claim that is there" -}}
  {{- end -}}
  {{- if and .sharedClaim (not .enabled) -}}
    {{- fail "kvstore.volume.sharedClaim: kvstore.volume.enabled is false" -}}
  {{- end -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
  {{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) -}}
    {{- fail (printf "router.autoscaling.maxReplicas: %d is below minReplicas: %d" (int .maxReplicas) (int .minReplicas)) -}}
  {{- end -}}
{{- end -}}
{{- end }}
