{{/* Parts of NetworkPolicies. Each takes {root, component}. */}}

{{- define "tandem.network.peer" }}
- podSelector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
{{- end }}

{{- define "tandem.network.head" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
  policyTypes: [Ingress{{ if .root.Values.networkPolicy.egress }}, Egress{{ end }}]
{{- end }}

{{- define "tandem.network.dns" }}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end }}
