{{/* /ready, unlike the default /health, costs no generation and falls as soon as a server drains. */}}
{{- define "sgl-graft.routerArguments" -}}
{{- $words := list "--host" "0.0.0.0" "--port" "30000" "--policy" .Values.router.policy "--service-discovery" "--selector" -}}
{{- range $label, $value := include "sgl-graft.servingSelector" . | fromYaml -}}
{{- $words = append $words (printf "%s=%s" $label $value) -}}
{{- end -}}
{{- $words = concat $words (list
  "--service-discovery-port" "30000"
  "--service-discovery-namespace" .Release.Namespace
  "--health-check-endpoint" "/ready"
  "--health-check-interval-secs" "10"
  "--worker-startup-timeout-secs" (int .Values.probes.startupBudgetSeconds | toString)
  "--shutdown-grace-period-secs" (sub (int .Values.drain.gracePeriodSeconds) (add .Values.drain.preStopSeconds 5) | toString)
  "--prometheus-port" "29000") -}}
{{- if .Values.apiKey.existingSecret.name }}{{ $words = concat $words (list "--api-key" "$(SGL_GRAFT_API_KEY)") }}{{ end -}}
{{- concat $words .Values.router.extraArgs | toYaml -}}
{{- end }}
