{{/* Several models in one release. */}}

{{/* Adds `Models` to the root: a root for each model, whose Values.model and Values.pools are that one's. The first is
     the model of `model` and `pools`; the others are those of `models`, with
     Key: the entry's key, empty for the first; it begins the names of its Deployments and volumes
     In: the values' path of its `pools`, such as models.story.
     Entry: the path of its model
     SharesStore: whether its workers use the release's store nodes. */}}
{{- define "tandem.models" -}}
{{- if not .Models -}}
{{- $base := dict "Release" .Release "Chart" .Chart "Capabilities" .Capabilities "Files" .Files "Template" .Template -}}
{{- $first := dict "Values" .Values "Key" "" "In" "" "Entry" "model" "SharesStore" true -}}
{{- $models := list (merge $first $base) -}}
{{- include "tandem.models.resources" . -}}
{{- range $key, $given := .Values.models -}}
{{- $pools := list -}}
{{- range $given.pools -}}
{{- $pools = append $pools (set (deepCopy .) "name" (printf "%s-%s" $key .name)) -}}
{{- end -}}
{{- $model := dict "uri" $given.uri "servedName" (dig "servedName" "" $given | default $key) "fromPeers" (dig "fromPeers" true $given) -}}
{{- range $name := list "size" "secret" "storageClassName" "downloaderImage" -}}
{{- $_ := set $model $name (dig $name "" $given) -}}
{{- end -}}
{{- $values := omit $.Values "models" "model" "pools" -}}
{{- $_ := set $values "model" $model -}}
{{- $_ := set $values "pools" $pools -}}
{{- $entry := printf "models.%s" $key -}}
{{- $own := dict "Values" $values "Key" $key "In" (printf "%s." $entry) "Entry" $entry "SharesStore" (dig "sharesStore" false $given) -}}
{{- include "tandem.models.resources" $own -}}
{{- $models = append $models (merge $own $base) -}}
{{- end -}}
{{- $_ := set . "Models" $models -}}
{{- end -}}
{{- end }}

{{/* Gives worker.resources to the pools without their own. */}}
{{- define "tandem.models.resources" -}}
{{- range $pool := .Values.pools -}}
{{- if not $pool.resources }}{{ $_ := set $pool "resources" $.Values.worker.resources }}{{ end -}}
{{- end -}}
{{- end }}

{{/* The entry of a further model in the router's setting `models`. Takes its root. */}}
{{- define "tandem.models.entry" -}}
model: {{ include "tandem.model.folder" . }}
mode: {{ include "tandem.mode" . }}
selector: {{ include "tandem.workerSelector" . }}
{{- with include "tandem.stores" . }}
stores: {{ . }}
{{- end }}
{{- end }}
