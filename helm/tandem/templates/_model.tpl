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
{{- else -}}/model{{ regexFind "#/.*$" .Values.model.uri | trimPrefix "#" | trimSuffix "/" }}
{{- end -}}
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
- name: model
  persistentVolumeClaim:
    claimName: {{ first (splitList "/" $rest) }}
    readOnly: true
{{- else if eq $scheme "oci" }}
- name: model
  image:
    reference: {{ $rest }}
    pullPolicy: {{ .Values.image.pullPolicy }}
{{- else if has $scheme (list "hf" "s3") }}
- name: model
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
- name: model
  mountPath: /model
  readOnly: true
  {{- if eq $scheme "pvc" }}
  {{- with regexReplaceAll "^[^/]*/?" (include "tandem.model.rest" .) "" | trimSuffix "/" }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Fetches the files of hf:// and s3://. Takes {root, device, image, texts}: `texts` for the router, which reads the
     tokenizer and the chat template alone. */}}
{{- define "tandem.model.init" -}}
{{- $scheme := include "tandem.model.scheme" .root -}}
{{- $rest := include "tandem.model.rest" .root -}}
{{- if has $scheme (list "hf" "s3") }}
- name: model
  {{- if eq $scheme "hf" }}
  {{- $parts := splitList "@" $rest }}
  image: {{ include "tandem.image" . }}
  command: [hf, download]
  args:
    - {{ first $parts | quote }}
    - --local-dir=/model
    {{- if gt (len $parts) 1 }}
    - --revision={{ last $parts }}
    {{- end }}
    {{- if .texts }}
    - "--include=*.json"
    - "--include=*.jinja"
    {{- else }}
    - "--include=*.json"
    - "--include=*.jinja"
    - "--include=*.safetensors"
    {{- end }}
  {{- else }}
  image: {{ .root.Values.model.downloaderImage }}
  command: [aws, s3, sync]
  args:
    - s3://{{ $rest }}
    - /model
    - --no-progress
    {{- if .texts }}
    - "--exclude=*"
    - "--include=*.json"
    - "--include=*.jinja"
    {{- end }}
  {{- end }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  env:
    - name: HOME
      value: /tmp
  {{- with .root.Values.model.secret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "tandem.containerSecurity" dict | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}
