{{/* Names that Kubernetes allows for each object: those of the release, and of the part of the service. */}}
{{- define "anneal.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "anneal.allowedHosts" -}}
{{- $hosts := list (include "anneal.name" .) -}}
{{- if .Values.ingress.isEnabled }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end -}}
{{- with .Values.settings.ANNEAL_ALLOWED_HOSTS }}{{ $hosts = append $hosts . }}{{ end -}}
{{- join "," $hosts -}}
{{- end }}

{{- define "anneal.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What all pods of the service have in common. */}}
{{- define "anneal.pod" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch}
automountServiceAccountToken: false
# Variables of services, such as ANNEAL_PORT, would be settings.
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "anneal.environment" -}}
envFrom: [{configMapRef: {name: {{ include "anneal.name" . }}}}, {secretRef: {name: {{ .Values.secret }}}}]
{{- end }}

{{/* Claim of a shared volume: the one that exists, or the chart's own. */}}
{{- define "anneal.claim" -}}
{{- .volume.claim | default (printf "%s-%s" (include "anneal.name" .root) .name) -}}
{{- end }}

{{- define "anneal.sharedVolumes" -}}
{{- $root := . -}}
{{- range $name := list "storage" "models" "keys" }}
{{- $volume := index $root.Values.volumes $name }}
{{- if or (ne $name "storage") $volume.isEnabled }}
- {name: {{ $name }}, persistentVolumeClaim: {claimName: {{ include "anneal.claim" (dict "root" $root "name" $name "volume" $volume) }}}}
{{- end }}
{{- end }}
{{- end }}
