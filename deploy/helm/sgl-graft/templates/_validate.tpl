{{/* What cannot work is refused here, all reasons at once. What the types and names of values must be is in
values.schema.json, which Helm checks first. */}}
{{- define "sgl-graft.validate" -}}
{{- $v := .Values -}}
{{- $problems := list -}}
{{- $problems = concat $problems (include "sgl-graft.checkImageAndModel" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkSpeculation" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkDevices" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkStorage" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkLifecycle" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkNetwork" . | fromJsonArray) -}}
{{- $problems = concat $problems (include "sgl-graft.checkArguments" . | fromJsonArray) -}}
{{- if $problems -}}
{{- fail (printf "\nsgl-graft cannot be installed like this:\n* %s\n" (join "\n* " $problems)) -}}
{{- end -}}
{{- end }}

{{- define "sgl-graft.checkImageAndModel" -}}
{{- $problems := list -}}
{{- with .Values.image -}}
{{- if not .repository -}}
{{- $problems = append $problems "image.repository is empty: no image is published yet; build deploy/docker/Dockerfile (or Dockerfile.cpu), push it, and name it here" -}}
{{- end -}}
{{- if and (not .tag) (not .digest) -}}
{{- $problems = append $problems "image.tag and image.digest are empty: name the version to run" -}}
{{- end -}}
{{- if and (eq .tag "latest") (not .digest) -}}
{{- $problems = append $problems "image.tag is latest: a restart would change the version; name one" -}}
{{- end -}}
{{- end -}}
{{- if not .Values.model.path -}}
{{- $problems = append $problems "model.path is empty: name the target's folder, or its name on a hub" -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{- define "sgl-graft.checkSpeculation" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- $name := $v.speculative.algorithm -}}
{{- $all := include "sgl-graft.algorithms" . | fromYaml -}}
{{- $known := keys $all | sortAlpha | join ", " -}}
{{- if not (hasKey $all $name) -}}
{{- $problems = append $problems (printf "speculative.algorithm %s is not known; use one of %s" $name $known) -}}
{{- else -}}
{{- $algorithm := index $all $name -}}
{{- if and $algorithm.draft (not $v.draft.path) -}}
{{- $problems = append $problems (printf "draft.path is empty: %s needs a draft that was trained for %s" $name ($v.model.path | default "the target")) -}}
{{- end -}}
{{- if and (eq $name "SPECBLOCK") $v.draft.path (not (hasPrefix "/" $v.draft.path)) -}}
{{- $problems = append $problems (printf "draft.path is %s: SPECBLOCK reads its draft before SGLang could fetch it from a hub; name a folder" $v.draft.path) -}}
{{- end -}}
{{- if and (not $algorithm.draft) $v.draft.path -}}
{{- $problems = append $problems (printf "draft.path is %s, but speculative.algorithm is %s and would not use it; leave it out, or choose an algorithm" $v.draft.path $name) -}}
{{- end -}}
{{- if and $algorithm.draft $v.draft.path (eq $v.draft.path $v.model.path) -}}
{{- $problems = append $problems "draft.path is model.path: a target cannot be its own draft" -}}
{{- end -}}
{{- if $algorithm.steps -}}
{{- $steps := $v.speculative.steps | default $algorithm.steps | int -}}
{{- $topk := $v.speculative.topk | default $algorithm.topk | int -}}
{{- $slots := $v.speculative.slots | default $algorithm.slots | int -}}
{{- if and (eq $name "GRAFT") (lt $topk 2) -}}
{{- $problems = append $problems "speculative.topk is 1: a chain has no weak branches to graft on; use at least 2, or EAGLE3" -}}
{{- end -}}
{{- if and (eq $topk 1) (ne $slots (add $steps 1 | int)) -}}
{{- $problems = append $problems (printf "speculative.topk 1 with %d steps is a chain of %d slots, not %d; set speculative.slots" $steps (add $steps 1) $slots) -}}
{{- end -}}
{{- if and (eq $name "EAGLE3") (gt $topk 1) (gt (sub $slots 1 | int) (add $topk (mul (sub $steps 1) (mul $topk $topk)) | int)) -}}
{{- $problems = append $problems (printf "speculative.slots is %d, but a tree of %d steps with %d branches has only %d nodes to verify" $slots $steps $topk (add 1 $topk (mul (sub $steps 1) (mul $topk $topk)))) -}}
{{- end -}}
{{- end -}}
{{- $graft := $v.speculative.graft -}}
{{- $table := $graft.table | default dict -}}
{{- $keys := or $v.apiKey.existingSecret.name $v.adminApiKey.existingSecret.name -}}
{{- if and $v.speculative.calibration.configMap (ne (toString $algorithm.config) "graft") -}}
{{- $problems = append $problems (printf "speculative.calibration is GRAFT's; %s does not read one" $name) -}}
{{- end -}}
{{- if and $v.speculative.calibration.configMap $graft.calibration -}}
{{- $problems = append $problems "speculative.calibration.configMap and speculative.graft.calibration are both set; keep one" -}}
{{- end -}}
{{- if $v.state.enabled -}}
{{- if ne (toString $algorithm.config) "graft" -}}
{{- $problems = append $problems (printf "state.enabled keeps GRAFT's successor table; %s has no state" $name) -}}
{{- else if $table.save_path -}}
{{- $problems = append $problems "state.enabled and speculative.graft.table.save_path are both set; keep one" -}}
{{- else if or (has (toString $table.scope) (list "request" "group")) (and $keys (ne (toString $table.scope) "shared")) -}}
{{- $problems = append $problems "state.enabled would store nothing: a table of scope request or group is private, and so is every table when API keys are set, unless speculative.graft.table.scope is shared (then tenants' text mixes in it)" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{- define "sgl-graft.checkDevices" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- $tp := $v.tensorParallelSize | int -}}
{{- $nodes := include "sgl-graft.nodes" . | int -}}
{{- if ne (mod $tp $nodes) 0 -}}
{{- $problems = append $problems (printf "tensorParallelSize %d cannot be split over multiNode.nodes %d" $tp $nodes) -}}
{{- end -}}
{{- $limits := ($v.resources | default dict).limits | default dict -}}
{{- $gpus := index $limits $v.gpu.resourceName -}}
{{- if eq $v.device "cpu" -}}
{{- if $gpus -}}
{{- $problems = append $problems (printf "resources.limits asks for %s, but device is cpu" $v.gpu.resourceName) -}}
{{- end -}}
{{- if $v.multiNode.enabled -}}
{{- $problems = append $problems "multiNode.enabled with device cpu: the CPU platform is for trying out, on one machine" -}}
{{- end -}}
{{- if $v.memFractionStatic -}}
{{- $problems = append $problems "memFractionStatic with device cpu: there is no GPU memory; set maxTotalTokens" -}}
{{- end -}}
{{- else if and $v.resources (not $gpus) -}}
{{- $problems = append $problems (printf "resources has no limits.%s: the pod would be scheduled without a GPU; add it, or set device: cpu" $v.gpu.resourceName) -}}
{{- else if $gpus -}}
{{- if ne (mod (mul (int $gpus) $nodes) $tp) 0 -}}
{{- $problems = append $problems (printf "resources.limits gives %d GPUs (%s on %d nodes), not a multiple of tensorParallelSize %d" (mul (int $gpus) $nodes) (toString $gpus) $nodes $tp) -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{- define "sgl-graft.checkStorage" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- $pods := mul (include "sgl-graft.mostReplicas" . | int) (include "sgl-graft.nodes" . | int) | int -}}
{{- with $v.cache -}}
{{- $once := and (not (has "ReadWriteMany" .accessModes)) (not (has "ReadOnlyMany" .accessModes)) -}}
{{- if and (eq .type "pvc") $once (gt $pods 1) -}}
{{- $problems = append $problems (printf "cache.accessModes is %s, but there can be %d pods: all but those on one node would wait for the volume; use ReadWriteMany, emptyDir or a model in the image" (join ", " .accessModes) $pods) -}}
{{- end -}}
{{- if and (eq .type "pvc") (not .size) -}}
{{- $problems = append $problems "cache.size is empty: the claim needs one, for target and draft" -}}
{{- end -}}
{{- if and (eq .type "emptyDir") (not .size) (eq $v.device "cuda") -}}
{{- $problems = append $problems "cache.type is emptyDir without cache.size: a model would fill the node's disk; say how large target and draft are" -}}
{{- end -}}
{{- if and (eq .type "existingClaim") (not .claimName) -}}
{{- $problems = append $problems "cache.claimName is empty: cache.type existingClaim needs the claim's name" -}}
{{- end -}}
{{- if and (eq .type "hostPath") (not .hostPath) -}}
{{- $problems = append $problems "cache.hostPath is empty: cache.type hostPath needs the node's folder" -}}
{{- end -}}
{{- $below := printf "%s/" (trimSuffix "/" .mountPath) -}}
{{- if and (eq .type "none") (or (hasPrefix $below $v.model.path) (hasPrefix $below $v.draft.path)) -}}
{{- $problems = append $problems (printf "cache.type is none, but a model is named below %s, which is then not mounted" .mountPath) -}}
{{- end -}}
{{- if and .readOnly (has .type (list "pvc" "emptyDir")) -}}
{{- $problems = append $problems (printf "cache.readOnly with cache.type %s: the volume starts empty and nothing could be put into it" .type) -}}
{{- end -}}
{{- end -}}
{{- if and $v.state.enabled $v.multiNode.enabled -}}
{{- $problems = append $problems "state.enabled with multiNode: the chart gives no volume to a group of nodes; load a table with speculative.graft.table.path instead" -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{- define "sgl-graft.checkLifecycle" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- if le (int $v.drain.gracePeriodSeconds) (add $v.drain.preStopSeconds 25 | int) -}}
{{- $problems = append $problems (printf "drain.gracePeriodSeconds %d is not above drain.preStopSeconds %d + 25: SGLang looks every 5 s whether requests are left and gives its schedulers 15 s, so answers would be cut off" (int $v.drain.gracePeriodSeconds) (int $v.drain.preStopSeconds)) -}}
{{- end -}}
{{- if le (int $v.probes.liveness.timeoutSeconds) (int $v.probes.healthCheckTimeoutSeconds) -}}
{{- $problems = append $problems (printf "probes.liveness.timeoutSeconds %d is not above probes.healthCheckTimeoutSeconds %d: a slow but healthy server would be restarted" (int $v.probes.liveness.timeoutSeconds) (int $v.probes.healthCheckTimeoutSeconds)) -}}
{{- end -}}
{{- $scaled := include "sgl-graft.isScaled" . -}}
{{- if $scaled -}}
{{- if not $v.metrics.enabled -}}
{{- $problems = append $problems (printf "autoscaling.mode %s needs metrics.enabled: it scales on the queue depth" $v.autoscaling.mode) -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- $problems = append $problems (printf "autoscaling.minReplicas %d is above autoscaling.maxReplicas %d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.autoscaling.mode "keda") (not $v.autoscaling.keda.prometheusAddress) -}}
{{- $problems = append $problems "autoscaling.keda.prometheusAddress is empty: KEDA needs to know where Prometheus is" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.mode "hpa") (lt (int $v.autoscaling.minReplicas) 1) -}}
{{- $problems = append $problems "autoscaling.minReplicas 0 with hpa: a queue that no server keeps has no depth; use 1" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.mode "keda") (lt (int $v.autoscaling.minReplicas) 1) -}}
{{- $problems = append $problems "autoscaling.minReplicas 0 with keda: the queue is kept by the servers, so nothing would ever start the first; use 1" -}}
{{- end -}}
{{- if and $v.pdb.enabled (not (kindIs "invalid" $v.pdb.minAvailable)) -}}
{{- $fewest := ternary $v.autoscaling.minReplicas $v.replicas (not (empty $scaled)) | int -}}
{{- if and (not (kindIs "string" $v.pdb.minAvailable)) (ge (int $v.pdb.minAvailable) (mul $fewest (include "sgl-graft.nodes" . | int) | int)) -}}
{{- $problems = append $problems (printf "pdb.minAvailable %d of %d replicas: no node could ever be drained; use fewer, or pdb.maxUnavailable" (int $v.pdb.minAvailable) $fewest) -}}
{{- end -}}
{{- end -}}
{{- range $what := list "serviceMonitor" "rules" "dashboards" -}}
{{- if and (index $v.metrics $what).enabled (not $v.metrics.enabled) -}}
{{- $problems = append $problems (printf "metrics.%s.enabled needs metrics.enabled" $what) -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{- define "sgl-graft.checkNetwork" -}}
{{- $problems := list -}}
{{- $v := .Values -}}
{{- if and $v.ingress.enabled $v.httpRoute.enabled -}}
{{- $problems = append $problems "ingress and httpRoute are both enabled; keep one" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- $problems = append $problems "ingress.host is empty: it would take every host's traffic" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- $problems = append $problems "httpRoute.parentRefs is empty: name the gateway" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.from) -}}
{{- $problems = append $problems "networkPolicy.enabled without networkPolicy.from: nobody could send a request" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (or $v.metrics.serviceMonitor.enabled (include "sgl-graft.isScaled" .)) (not $v.networkPolicy.metricsFrom) -}}
{{- $problems = append $problems "networkPolicy.enabled without networkPolicy.metricsFrom: Prometheus could not scrape the pods" -}}
{{- end -}}
{{- if and (not $v.serviceAccount.create) (not $v.serviceAccount.name) -}}
{{- $problems = append $problems "serviceAccount.create is false and serviceAccount.name is empty: name the account to use" -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}

{{/* Flags and variables that the chart sets, and the value that sets each. */}}
{{- define "sgl-graft.ownFlags" -}}
--model-path: model.path
--model: model.path
--revision: model.revision
--served-model-name: model.servedName
--context-length: model.contextLength
--dtype: model.dtype
--device: device
--host: service
--port: service
--tp: tensorParallelSize
--tp-size: tensorParallelSize
--tensor-parallel-size: tensorParallelSize
--max-running-requests: maxRunningRequests
--mem-fraction-static: memFractionStatic
--max-total-tokens: maxTotalTokens
--speculative-algorithm: speculative.algorithm
--speculative-draft-model-path: draft.path
--speculative-draft-model-revision: draft.revision
--speculative-num-steps: speculative.steps
--speculative-eagle-topk: speculative.topk
--speculative-num-draft-tokens: speculative.slots
--graft-config: speculative.graft, .blockpilot or .specblock
--enable-metrics: metrics.enabled
--api-key: apiKey.existingSecret
--admin-api-key: adminApiKey.existingSecret
--nnodes: multiNode.nodes
--node-rank: multiNode.enabled
--dist-init-addr: multiNode.port
{{- end }}

{{- define "sgl-graft.checkArguments" -}}
{{- $problems := list -}}
{{- $own := include "sgl-graft.ownFlags" . | fromYaml -}}
{{- range .Values.extraArgs -}}
{{- $flag := regexReplaceAll "=.*" . "" -}}
{{- with index $own $flag -}}
{{- $problems = append $problems (printf "extraArgs has %s: set %s instead" $flag .) -}}
{{- end -}}
{{- end -}}
{{- $variables := dict "SGLGRAFT_CONFIG" "speculative.graft" "SGLGRAFT_ALGORITHM" "speculative.algorithm" "SGLANG_PLATFORM" "device" "HF_TOKEN" "hfToken.existingSecret" "SGLANG_HEALTH_CHECK_TIMEOUT" "probes.healthCheckTimeoutSeconds" -}}
{{- range .Values.extraEnv -}}
{{- if hasKey $variables .name -}}
{{- $problems = append $problems (printf "extraEnv has %s: set %s instead" .name (index $variables .name)) -}}
{{- end -}}
{{- end -}}
{{- toJson $problems -}}
{{- end }}
