{{/* Where the model's files come from. */}}

{{- define "tandem.model.scheme" -}}
{{- if hasPrefix "/" .Values.model.uri -}}path{{- else -}}{{ regexFind "^[a-z0-9]+" .Values.model.uri }}{{- end -}}
{{- end }}

{{/* The URI without scheme and fragment. */}}
{{- define "tandem.model.rest" -}}
{{- regexReplaceAll "#.*$" (regexReplaceAll "^[a-z0-9]+://" .Values.model.uri "") "" -}}
{{- end }}

{{/* The model's folder in the containers. */}}
{{- define "tandem.model.folder" -}}
{{- if eq (include "tandem.model.scheme" .) "path" -}}{{ .Values.model.uri }}
{{- else -}}/{{ include "tandem.model.volume" . }}{{ regexFind "#/.*$" .Values.model.uri | trimPrefix "#" | trimSuffix "/" }}
{{- end -}}
{{- end }}

{{/* Name of its volume, which is mounted under this name. */}}
{{- define "tandem.model.volume" -}}
{{- list "model" .Key | compact | join "-" -}}
{{- end }}

{{- define "tandem.model.servedName" -}}
{{- $rest := include "tandem.model.rest" . -}}
{{- if .Values.model.servedName -}}{{ .Values.model.servedName }}
{{- else if eq (include "tandem.model.scheme" .) "hf" -}}{{ first (splitList "@" $rest) }}
{{- else if eq (include "tandem.model.scheme" .) "oci" -}}{{ first (splitList "@" (base $rest)) | splitList ":" | first }}
{{- else -}}{{ base (trimSuffix "/" $rest) }}
{{- end -}}
{{- end }}

{{- define "tandem.model.volumes" -}}
{{- $scheme := include "tandem.model.scheme" . -}}
{{- $rest := include "tandem.model.rest" . -}}
{{- if eq $scheme "pvc" }}
- name: {{ include "tandem.model.volume" . }}
  persistentVolumeClaim:
    claimName: {{ first (splitList "/" $rest) }}
    readOnly: true
{{- else if eq $scheme "oci" }}
- name: {{ include "tandem.model.volume" . }}
  image:
    reference: {{ $rest }}
    pullPolicy: {{ .Values.image.pullPolicy }}
{{- else if has $scheme (list "hf" "s3") }}
- name: {{ include "tandem.model.volume" . }}
  {{- if .Values.model.storageClassName }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- if ne .Values.model.storageClassName "default" }}
        storageClassName: {{ .Values.model.storageClassName }}
        {{- end }}
        resources:
          requests:
            storage: {{ .Values.model.size }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.size }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.model.mounts" -}}
{{- $scheme := include "tandem.model.scheme" . -}}
{{- if ne $scheme "path" }}
- name: {{ include "tandem.model.volume" . }}
  mountPath: /{{ include "tandem.model.volume" . }}
  readOnly: true
  {{- if eq $scheme "pvc" }}
  {{- with regexReplaceAll "^[^/]*/?" (include "tandem.model.rest" .) "" | trimSuffix "/" }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Name of the Service whose addresses are the workers that serve this model already; empty where its files are not
     fetched, or not from them. */}}
{{- define "tandem.model.peers" -}}
{{- if and (has (include "tandem.model.scheme" .) (list "hf" "s3")) .Values.model.fromPeers -}}
{{ list .Release.Name .Key "peers" | compact | join "-" }}
{{- end -}}
{{- end }}

{{/* The command that downloads the files of hf:// and s3://, as a list. Takes {root, texts}. */}}
{{- define "tandem.model.download" -}}
{{- $rest := include "tandem.model.rest" .root -}}
{{- if eq (include "tandem.model.scheme" .root) "hf" }}
{{- $parts := splitList "@" $rest -}}
- hf
- download
- {{ first $parts | quote }}
- --local-dir=/{{ include "tandem.model.volume" .root }}
{{- if gt (len $parts) 1 }}
- --revision={{ last $parts }}
{{- end }}
- "--include=*.json"
- "--include=*.jinja"
{{- if not .texts }}
- "--include=*.safetensors"
{{- end }}
{{- else -}}
- aws
- s3
- sync
- s3://{{ $rest }}
- /{{ include "tandem.model.volume" .root }}
- --no-progress
{{- if .texts }}
- "--exclude=*"
- "--include=*.json"
- "--include=*.jinja"
{{- end }}
{{- end }}
{{- end }}

{{/* Init containers that fetch the files of hf:// and s3://. Takes {root, device, image, texts}: `texts` for the router,
     which reads the tokenizer and the chat template alone; of a worker's also {pool, config}. A worker first asks those
     that serve the model already; what they do not bring is downloaded. */}}
{{- define "tandem.model.init" -}}
{{- $scheme := include "tandem.model.scheme" .root -}}
{{- $hub := eq $scheme "hf" -}}
{{- $volume := include "tandem.model.volume" .root -}}
{{- $peers := and (not .texts) (include "tandem.model.peers" .root) -}}
{{- if has $scheme (list "hf" "s3") }}
{{- if $peers }}
- name: {{ $hub | ternary $volume "peers" }}
  image: {{ include "tandem.image" . }}
  command: [python, -m, services.worker.weights]
  args:
    {{- include "tandem.worker.args" . | trim | nindent 4 }}
    {{- if not (include "tandem.poolSetting" (merge (dict "key" "weights_from" "name" "") .)) }}
    - --weights-from={{ $peers }}.{{ .root.Release.Namespace }}.svc:50061
    {{- end }}
    - --
    {{- if $hub }}
    {{- include "tandem.model.download" . | trim | nindent 4 }}
    {{- else }}
    - "true"  # the next container downloads what is missing
    {{- end }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  env:
    {{- include "tandem.worker.env" . | nindent 4 }}
  {{- include "tandem.model.secret" .root }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "tandem.containerSecurity" (dict "capabilities" (.pool.rdma | empty | ternary list (list "IPC_LOCK")) "override" .pool.securityContext) | nindent 4 }}
  resources:
    {{- include "tandem.worker.resources" . | nindent 4 }}
  volumeMounts:
    {{- include "tandem.worker.ownMounts" . | trim | nindent 4 }}
    - name: {{ $volume }}
      mountPath: /{{ $volume }}
{{- end }}
{{- if not (and $peers $hub) }}
- name: {{ $volume }}
  image: {{ $hub | ternary (include "tandem.image" .) .root.Values.model.downloaderImage }}
  command:
    {{- include "tandem.model.download" . | trim | nindent 4 }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  env:
    - name: HOME
      value: /tmp
  {{- include "tandem.model.secret" .root }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "tandem.containerSecurity" dict | nindent 4 }}
  volumeMounts:
    - name: {{ $volume }}
      mountPath: /{{ $volume }}
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.model.secret" -}}
{{- with .Values.model.secret }}
  envFrom:
    - secretRef:
        name: {{ . }}
{{- end }}
{{- end }}
