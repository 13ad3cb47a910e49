{{- define "sgl-graft.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Short enough for the longest suffix and a StatefulSet's pod number. */}}
{{- define "sgl-graft.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "sgl-graft.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "sgl-graft.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* What selectors use: immutable, so nothing here may come from values that change. */}}
{{- define "sgl-graft.selector" -}}
app.kubernetes.io/name: {{ include "sgl-graft.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sgl-graft.engineSelector" -}}
{{ include "sgl-graft.selector" . }}
app.kubernetes.io/component: engine
{{- end }}

{{/* The pods that answer requests: of a group of nodes, only its first. */}}
{{- define "sgl-graft.servingSelector" -}}
{{ include "sgl-graft.engineSelector" . }}
{{- if .Values.multiNode.enabled }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "sgl-graft.routerSelector" -}}
{{ include "sgl-graft.selector" . }}
app.kubernetes.io/component: router
{{- end }}

{{- define "sgl-graft.labels" -}}
{{ include "sgl-graft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "sgl-graft.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag }}{{- end -}}
{{- end -}}
{{- end }}

{{- define "sgl-graft.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "sgl-graft.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{- define "sgl-graft.servedName" -}}
{{- .Values.model.servedName | default .Values.model.path -}}
{{- end }}

{{/* Service that clients, Ingress and HTTPRoute use. */}}
{{- define "sgl-graft.frontService" -}}
{{- ternary (printf "%s-router" (include "sgl-graft.fullname" .)) (include "sgl-graft.fullname" .) .Values.router.enabled -}}
{{- end }}

{{/* Kind of the engine's workload: per-replica storage needs a StatefulSet, several nodes a LeaderWorkerSet. */}}
{{- define "sgl-graft.workload" -}}
{{- if .Values.multiNode.enabled -}}LeaderWorkerSet
{{- else if and .Values.state.enabled (eq .Values.state.type "pvc") -}}StatefulSet
{{- else -}}Deployment
{{- end -}}
{{- end }}

{{- define "sgl-graft.workloadApi" -}}
{{- ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" .Values.multiNode.enabled -}}
{{- end }}

{{- define "sgl-graft.isScaled" -}}
{{- if ne .Values.autoscaling.mode "none" }}true{{ end -}}
{{- end }}

{{/* Most servers there can be at once. */}}
{{- define "sgl-graft.mostReplicas" -}}
{{- if include "sgl-graft.isScaled" . }}{{ .Values.autoscaling.maxReplicas }}{{ else }}{{ .Values.replicas }}{{ end -}}
{{- end }}

{{- define "sgl-graft.nodes" -}}
{{- ternary .Values.multiNode.nodes 1 .Values.multiNode.enabled -}}
{{- end }}

{{/* The algorithms this release has, what each needs, and their defaults (as `sgl-graft serve` has them). */}}
{{- define "sgl-graft.algorithms" -}}
none: {draft: false}
EAGLE3: {draft: true, steps: 5, topk: 4, slots: 16}
GRAFT: {draft: true, steps: 5, topk: 4, slots: 16, config: graft}
BLOCKPILOT: {draft: true, config: blockpilot}
SPECBLOCK: {draft: true, config: specblock}
{{- end }}

{{- define "sgl-graft.algorithm" -}}
{{- index (include "sgl-graft.algorithms" . | fromYaml) .Values.speculative.algorithm | default dict | toJson -}}
{{- end }}

{{/* Content of --graft-config; empty when there is nothing to say. */}}
{{- define "sgl-graft.config" -}}
{{- $algorithm := include "sgl-graft.algorithm" . | fromJson -}}
{{- if $algorithm.config -}}
{{- $section := deepCopy (index .Values.speculative $algorithm.config) -}}
{{- if .Values.speculative.calibration.configMap -}}
{{- $_ := set $section "calibration" (printf "/etc/sgl-graft/calibration/%s" .Values.speculative.calibration.key) -}}
{{- end -}}
{{- if .Values.state.enabled -}}
{{- $table := deepCopy ($section.table | default dict) -}}
{{- $_ := set $table "save_path" "/var/lib/sgl-graft/successors.table" -}}
{{- $_ := set $table "save_every_s" .Values.state.saveEverySeconds -}}
{{- $_ := set $section "table" $table -}}
{{- end -}}
{{- if $section -}}
{{ dict $algorithm.config $section | toYaml }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Labels of our series as Prometheus sees them; ranks repeat the gauges, so only the first is read. */}}
{{- define "sgl-graft.seriesOfModel" -}}
namespace="{{ .Release.Namespace }}", service="{{ include "sgl-graft.fullname" . }}", tp_rank="0"
{{- end }}
