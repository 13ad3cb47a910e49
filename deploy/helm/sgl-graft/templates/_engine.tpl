{{/* The server's arguments, one word an item. */}}
{{- define "sgl-graft.arguments" -}}
{{- $v := .Values -}}
{{- $algorithm := include "sgl-graft.algorithm" . | fromJson -}}
{{- $words := list "--model-path" $v.model.path -}}
{{- with $v.model.revision }}{{ $words = concat $words (list "--revision" .) }}{{ end -}}
{{- with $v.model.servedName }}{{ $words = concat $words (list "--served-model-name" .) }}{{ end -}}
{{- with $v.model.contextLength }}{{ $words = concat $words (list "--context-length" (int . | toString)) }}{{ end -}}
{{- $words = concat $words (list "--device" $v.device) -}}
{{- with $v.model.dtype | default (ternary "float32" "" (eq $v.device "cpu")) }}{{ $words = concat $words (list "--dtype" .) }}{{ end -}}
{{- $words = concat $words (list "--host" "0.0.0.0" "--port" "30000") -}}
{{- if gt (int $v.tensorParallelSize) 1 }}{{ $words = concat $words (list "--tensor-parallel-size" (int $v.tensorParallelSize | toString)) }}{{ end -}}
{{- if $v.multiNode.enabled -}}
{{- $words = concat $words (list "--nnodes" (int $v.multiNode.nodes | toString) "--node-rank" "$(LWS_WORKER_INDEX)" "--dist-init-addr" (printf "$(LWS_LEADER_ADDRESS):%d" (int $v.multiNode.port))) -}}
{{- end -}}
{{- with $v.maxRunningRequests }}{{ $words = concat $words (list "--max-running-requests" (int . | toString)) }}{{ end -}}
{{- with $v.memFractionStatic }}{{ $words = concat $words (list "--mem-fraction-static" (toString .)) }}{{ end -}}
{{- with $v.maxTotalTokens | default (ternary 32768 0 (eq $v.device "cpu")) }}{{ $words = concat $words (list "--max-total-tokens" (int . | toString)) }}{{ end -}}
{{- if $algorithm.draft -}}
{{- $words = concat $words (list "--speculative-algorithm" $v.speculative.algorithm "--speculative-draft-model-path" $v.draft.path) -}}
{{- with $v.draft.revision }}{{ $words = concat $words (list "--speculative-draft-model-revision" .) }}{{ end -}}
{{- range $flag, $value := dict
  "--speculative-num-steps" ($v.speculative.steps | default $algorithm.steps)
  "--speculative-eagle-topk" ($v.speculative.topk | default $algorithm.topk)
  "--speculative-num-draft-tokens" ($v.speculative.slots | default $algorithm.slots) -}}
{{- with $value }}{{ $words = concat $words (list $flag (int . | toString)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if include "sgl-graft.config" . }}{{ $words = concat $words (list "--graft-config" "/etc/sgl-graft/config/graft.yaml") }}{{ end -}}
{{- if $v.metrics.enabled }}{{ $words = append $words "--enable-metrics" }}{{ end -}}
{{- if $v.apiKey.existingSecret.name }}{{ $words = concat $words (list "--api-key" "$(SGL_GRAFT_API_KEY)") }}{{ end -}}
{{- if $v.adminApiKey.existingSecret.name }}{{ $words = concat $words (list "--admin-api-key" "$(SGL_GRAFT_ADMIN_API_KEY)") }}{{ end -}}
{{- concat $words $v.extraArgs | toYaml -}}
{{- end }}

{{- define "sgl-graft.secretEnv" -}}
{{- $v := .Values -}}
{{- range $variable, $secret := dict "HF_TOKEN" $v.hfToken "SGL_GRAFT_API_KEY" $v.apiKey "SGL_GRAFT_ADMIN_API_KEY" $v.adminApiKey -}}
{{- with $secret.existingSecret }}
{{- if .name }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "sgl-graft.environment" -}}
{{- $v := .Values -}}
- name: HOME
  value: /home/sgl-graft
- name: SGLANG_HEALTH_CHECK_TIMEOUT
  value: {{ int $v.probes.healthCheckTimeoutSeconds | quote }}
{{- if eq $v.device "cpu" }}
- name: SGLANG_PLATFORM
  value: sgl_graft_cpu
{{- end }}
{{- if ne $v.cache.type "none" }}
- name: HF_HOME
  value: {{ printf "%s/hub" (trimSuffix "/" $v.cache.mountPath) }}
{{- end }}
{{- if and (hasPrefix "/" $v.model.path) (or (not $v.draft.path) (hasPrefix "/" $v.draft.path)) }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- include "sgl-graft.secretEnv" . }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sgl-graft.resources" -}}
{{- $v := .Values -}}
{{- if $v.resources -}}
{{ toYaml $v.resources }}
{{- else if eq $v.device "cpu" -}}
requests: {cpu: "2", memory: 6Gi}
limits: {memory: 8Gi}
{{- else -}}
limits:
  {{ $v.gpu.resourceName }}: {{ div (int $v.tensorParallelSize) (include "sgl-graft.nodes" . | int) | toString | quote }}
{{- end -}}
{{- end }}

{{/* Start-up and liveness ask for a generated token; readiness is the flag that falls first when a server drains. */}}
{{- define "sgl-graft.probes" -}}
{{- $v := .root.Values -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: {{ $v.probes.liveness.timeoutSeconds }}
  failureThreshold: {{ div (add (int $v.probes.startupBudgetSeconds) 9) 10 }}
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: {{ $v.probes.liveness.periodSeconds }}
  timeoutSeconds: {{ $v.probes.liveness.timeoutSeconds }}
  failureThreshold: {{ $v.probes.liveness.failureThreshold }}
readinessProbe:
  httpGet: {path: {{ .ready }}, port: http}
  periodSeconds: {{ $v.probes.readiness.periodSeconds }}
  timeoutSeconds: {{ $v.probes.readiness.timeoutSeconds }}
  failureThreshold: {{ $v.probes.readiness.failureThreshold }}
{{- end }}

{{- define "sgl-graft.mounts" -}}
{{- $v := .Values -}}
- {name: home, mountPath: /home/sgl-graft}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if ne $v.cache.type "none" }}
- {name: cache, mountPath: {{ $v.cache.mountPath }}, readOnly: {{ $v.cache.readOnly }}}
{{- end }}
{{- if include "sgl-graft.config" . }}
- {name: config, mountPath: /etc/sgl-graft/config, readOnly: true}
{{- end }}
{{- if $v.speculative.calibration.configMap }}
- {name: calibration, mountPath: /etc/sgl-graft/calibration, readOnly: true}
{{- end }}
{{- if $v.state.enabled }}
- {name: state, mountPath: /var/lib/sgl-graft}
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sgl-graft.volumes" -}}
{{- $v := .Values -}}
{{- $fullname := include "sgl-graft.fullname" . -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $v.shm.size }}}}
{{- with $v.cache }}
{{- if eq .type "pvc" }}
- {name: cache, persistentVolumeClaim: {claimName: {{ $fullname }}-cache}}
{{- else if eq .type "existingClaim" }}
- {name: cache, persistentVolumeClaim: {claimName: {{ .claimName }}, readOnly: {{ .readOnly }}}}
{{- else if eq .type "emptyDir" }}
- name: cache
  emptyDir: {{ if .size }}{sizeLimit: {{ .size }}}{{ else }}{}{{ end }}
{{- else if eq .type "hostPath" }}
- {name: cache, hostPath: {path: {{ .hostPath }}, type: Directory}}
{{- end }}
{{- end }}
{{- if include "sgl-graft.config" . }}
- {name: config, configMap: {name: {{ $fullname }}}}
{{- end }}
{{- if $v.speculative.calibration.configMap }}
- {name: calibration, configMap: {name: {{ $v.speculative.calibration.configMap }}}}
{{- end }}
{{- if and $v.state.enabled (eq $v.state.type "emptyDir") }}
- {name: state, emptyDir: {sizeLimit: {{ $v.state.size }}}}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A pod of the engine. `ready`: path of the readiness probe; nodes after the first have only /health. */}}
{{- define "sgl-graft.pod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "sgl-graft.engineSelector" .root | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $config := include "sgl-graft.config" .root }}
  {{- if or $config $v.podAnnotations }}
  annotations:
    {{- if $config }}
    checksum/config: {{ sha256sum $config }}
    {{- end }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sgl-graft.serviceAccount" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.drain.gracePeriodSeconds }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with index $v $key }}
  {{ $key }}: {{ if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "sgl-graft.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        {{- include "sgl-graft.arguments" .root | nindent 8 }}
      env:
        {{- include "sgl-graft.environment" .root | nindent 8 }}
      ports:
        - {name: http, containerPort: 30000}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      resources:
        {{- include "sgl-graft.resources" .root | nindent 8 }}
      {{- include "sgl-graft.probes" . | nindent 6 }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ int $v.drain.preStopSeconds | quote }}]
      volumeMounts:
        {{- include "sgl-graft.mounts" .root | nindent 8 }}
  volumes:
    {{- include "sgl-graft.volumes" .root | nindent 4 }}
{{- end }}
