{{/* What the Pods of all services have alike. */}}

{{/* Takes {capabilities, override}; both may be empty. */}}
{{- define "tandem.containerSecurity" -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- if .capabilities }}{{ $_ := set $capabilities "add" .capabilities }}{{ end -}}
{{- $default := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" $capabilities -}}
{{- mergeOverwrite $default (.override | default dict) | toYaml -}}
{{- end }}

{{/* Takes {root, component, priority, override}. */}}
{{- define "tandem.podStart" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "tandem.name" . }}
automountServiceAccountToken: {{ has .component (list "router" "planner") }}
enableServiceLinks: false  # its variables would look like settings
securityContext:
  {{- mergeOverwrite (deepCopy $root.Values.podSecurityContext) (.override | default dict) | toYaml | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .priority }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Variables that each service reads under its own prefix: ROUTER, WORKER or KVSTORE. Takes {root, prefix}. */}}
{{- define "tandem.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
{{- with .root.Values.fleetKey }}
{{- if .existingSecret }}
- name: TANDEM_{{ $.prefix }}_FLEET_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.tlsArgs" -}}
{{- if .Values.tls.services.existingSecret }}
- --tls.cert=/etc/tandem/tls/tls.crt
- --tls.key=/etc/tandem/tls/tls.key
- --tls.ca=/etc/tandem/tls/ca.crt
{{- with .Values.tls.services.serverName }}
- --tls.server-name={{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.tracesArgs" -}}
{{- with .Values.traces }}
{{- if .endpoint }}
- --traces.endpoint={{ .endpoint }}
- --traces.protocol={{ .protocol }}
{{- end }}
{{- end }}
{{- end }}

{{/* The volumes of every service. Takes {root, config}: name of the file in the ConfigMap, or empty. */}}
{{- define "tandem.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .config }}
- name: config
  configMap:
    name: {{ .root.Release.Name }}-config
    items:
      - key: {{ .config }}
        path: {{ .config }}
{{- end }}
{{- with .root.Values.tls.services.existingSecret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .config }}
- name: config
  mountPath: /etc/tandem/config
  readOnly: true
{{- end }}
{{- if .root.Values.tls.services.existingSecret }}
- name: tls
  mountPath: /etc/tandem/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "tandem.shm" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}

{{/* Spread over zones and Nodes where there is a choice. Takes {root, component, pool}. */}}
{{- define "tandem.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "tandem.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* httpGet of a probe. Takes {path, port, scheme}. */}}
{{- define "tandem.httpGet" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
  scheme: {{ .scheme | default "HTTP" }}
{{- end }}

{{- define "tandem.policyVersion" -}}
{{- if semverCompare ">=1.21-0" .Capabilities.KubeVersion.Version -}}policy/v1{{- else -}}policy/v1beta1{{- end -}}
{{- end }}
