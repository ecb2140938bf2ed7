{{/* Metadata and spec of a pool's Pods. Takes {root, pool, config, component}. The component is worker, or rank in the Pods of a
group but its leader's: those are no workers for routers, and serve nothing. They have no probes: one that ends is started again, and
one that is silent ends its leader. */}}
{{- define "tandem.worker.podTemplate" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $leads := eq .component "worker" -}}
{{- $config := include "tandem.worker.config" . -}}
{{- $device := include "tandem.device" $pool -}}
{{- $image := include "tandem.image" (dict "root" $root "device" $device "image" $pool.image) -}}
{{- $selector := dict "root" $root "component" .component "pool" $pool -}}
metadata:
  labels:
    {{- if $leads }}
    {{- include "tandem.worker.podLabels" . | nindent 4 }}
    {{- else }}
    {{- include "tandem.selector" $selector | nindent 4 }}
    {{- end }}
    tandem-llm.io/layout: {{ include "tandem.layoutLabel" $root | quote }}
    {{- with include "tandem.worker.topology" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with mergeOverwrite dict $root.Values.worker.podLabels ($pool.podLabels | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- if $config }}
    checksum/config: {{ $config | sha256sum }}
    {{- end }}
    kubectl.kubernetes.io/default-container: worker
    {{- with mergeOverwrite dict $root.Values.worker.podAnnotations ($pool.podAnnotations | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "tandem.podStart" (dict "root" $root "component" "worker" "priority" ($pool.priorityClassName | default $root.Values.worker.priorityClassName) "override" $pool.podSecurityContext) | nindent 2 }}
  # preStop, the drain and what it takes to end.
  terminationGracePeriodSeconds: {{ add $root.Values.worker.drainTimeoutSeconds 20 }}
  {{- if $pool.dra }}
  resourceClaims:
    - name: gpu
      resourceClaimTemplateName: {{ $root.Release.Name }}-{{ $pool.name }}
  {{- end }}
  {{- if or $root.Values.preflight.enabled (has (include "tandem.model.scheme" $root) (list "hf" "s3")) }}
  initContainers:
    {{- with include "tandem.model.init" (merge (dict "device" $device "image" $pool.image) .) | trim }}{{ . | nindent 4 }}{{ end }}
    {{- if $root.Values.preflight.enabled }}
    - name: preflight
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [tandem, preflight]
      args:
        - --component=worker
        {{- if $pool.rdma }}
        - --rdma
        {{- end }}
        - --
        {{- include "tandem.worker.args" . | trim | nindent 8 }}
        {{- $hosts := include "tandem.worker.hosts" $pool | int }}
        {{- if gt $hosts 1 }}
        - --group-hosts={{ $hosts }}
        - --group-leader=localhost:50062  # a preflight contacts no other process
        {{- end }}
      env:
        {{- include "tandem.worker.env" . | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "tandem.containerSecurity" (dict "capabilities" ($pool.rdma | empty | ternary list (list "IPC_LOCK")) "override" $pool.securityContext) | nindent 8 }}
      resources:
        {{- include "tandem.worker.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "tandem.worker.mounts" . | nindent 8 }}
    {{- end }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [python, -m, services.{{ get (dict "auto" "worker" "prefill" "prefill") $pool.role | default "decode" }}]
      args:
        {{- include "tandem.worker.args" . | trim | nindent 8 }}
        {{- with include "tandem.worker.groupArgs" $pool | trim }}{{ . | nindent 8 }}{{ end }}
      env:
        {{- include "tandem.worker.env" . | nindent 8 }}
      {{- if $leads }}
      ports:
        {{- if gt (include "tandem.worker.hosts" $pool | int) 1 }}
        - name: group
          containerPort: 50062
          protocol: TCP
        {{- end }}
        - name: session
          containerPort: 50061
          protocol: TCP
        - name: metrics
          containerPort: 9090
          protocol: TCP
      startupProbe:
        {{- include "tandem.httpGet" (dict "path" "/healthz" "port" "metrics") | nindent 8 }}
        periodSeconds: 5
        failureThreshold: {{ div (add $root.Values.worker.startupTimeoutSeconds 4) 5 }}
      readinessProbe:
        {{- include "tandem.httpGet" (dict "path" "/readyz" "port" "metrics") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        {{- include "tandem.httpGet" (dict "path" "/healthz" "port" "metrics") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          # Routers see in the meantime that the Pod is ending. The drain itself begins with SIGTERM.
          exec:
            command: [sleep, "2"]
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "tandem.containerSecurity" (dict "capabilities" ($pool.rdma | empty | ternary list (list "IPC_LOCK")) "override" $pool.securityContext) | nindent 8 }}
      resources:
        {{- include "tandem.worker.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "tandem.worker.mounts" . | nindent 8 }}
  volumes:
    {{- include "tandem.volumes" . | nindent 4 }}
    {{- include "tandem.shm" ($pool.shm | default $root.Values.worker.shm) | nindent 4 }}
    {{- with include "tandem.model.volumes" $root | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with concat $root.Values.worker.extraVolumes ($pool.extraVolumes | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  topologySpreadConstraints:
    {{- include "tandem.spread" $selector | trim | nindent 4 }}
  {{- with include "tandem.worker.affinity" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with $pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
