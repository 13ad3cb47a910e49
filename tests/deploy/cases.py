"""Sets of values: what renders, and what is refused with which reason."""

from __future__ import annotations

import yaml

from .chart import CHART, Values, merged

IMAGE: Values = {"image": {"repository": "registry.example/sgl-graft"}}
GPU: Values = merged(
    IMAGE, {"model": {"path": "/models/target", "servedName": "target"}, "draft": {"path": "/models/draft"}}
)
PLAIN: Values = merged(IMAGE, {"model": {"path": "/models/target"}, "speculative": {"algorithm": "none"}})
CPU: Values = merged(IMAGE, yaml.safe_load((CHART / "values-cpu.yaml").read_text()))
SHARED: Values = {"cache": {"accessModes": ["ReadWriteMany"]}}
TWO: Values = merged(SHARED, {"replicas": 2})
NODES: Values = merged(SHARED, {"multiNode": {"enabled": True, "nodes": 2}, "tensorParallelSize": 16})
STATE: Values = {"state": {"enabled": True}}
ROUTER: Values = merged(TWO, {"router": {"enabled": True}})
HPA: Values = merged(SHARED, {"autoscaling": {"mode": "hpa", "minReplicas": 2, "maxReplicas": 6}})
KEDA: Values = merged(
    SHARED,
    {"autoscaling": {"mode": "keda", "keda": {"prometheusAddress": "http://prometheus.monitoring:9090"}}},
)
KEY: Values = {"apiKey": {"existingSecret": {"name": "keys"}}}
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "front"}}}
MONITORS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
POLICY: Values = {"networkPolicy": {"enabled": True, "from": [PEER], "metricsFrom": [MONITORS]}}
WATCHED: Values = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    }
}


def speculative(algorithm: str, **settings: object) -> Values:
    return {"speculative": {"algorithm": algorithm, **settings}}


GOOD: dict[str, Values] = {
    # algorithms
    "none": PLAIN,
    "eagle3": merged(GPU, speculative("EAGLE3")),
    "eagle3-chain": merged(GPU, speculative("EAGLE3", steps=4, topk=1, slots=5)),
    "graft": GPU,
    "graft-tree": merged(GPU, speculative("GRAFT", steps=6, topk=8, slots=32)),
    "graft-staged": merged(GPU, speculative("GRAFT", graft={"rule": "staged", "table": {"row_width": 4}})),
    "graft-calibration": merged(GPU, speculative("GRAFT", calibration={"configMap": "draft-calibration"})),
    "graft-table": merged(GPU, speculative("GRAFT", graft={"table": {"path": "/models/table"}})),
    "blockpilot": merged(GPU, speculative("BLOCKPILOT")),
    "blockpilot-ewma": merged(
        GPU, speculative("BLOCKPILOT", slots=16, blockpilot={"policy": "ewma", "candidates": [2, 4, 8, 16]})
    ),
    "specblock": merged(GPU, speculative("SPECBLOCK")),
    "specblock-settings": merged(
        GPU, speculative("SPECBLOCK", slots=24, specblock={"blocks": 3, "children": [8, 4, 2, 1]})
    ),
    "hub": merged(
        IMAGE,
        {
            "model": {
                "path": "example/target",
                "revision": "abc123",
                "contextLength": 8192,
                "dtype": "bfloat16",
            },
            "draft": {"path": "example/draft", "revision": "def456"},
            "hfToken": {"existingSecret": {"name": "hub"}},
        },
    ),
    # CPU mode
    "cpu": CPU,
    "cpu-none": merged(CPU, {"draft": {"path": ""}}, speculative("none")),
    "cpu-eagle3": merged(CPU, speculative("EAGLE3")),
    "cpu-state": merged(CPU, STATE, {"state": {"type": "emptyDir"}}),
    "cpu-router": merged(CPU, {"replicas": 2, "router": {"enabled": True}}),
    "cpu-resources": merged(
        CPU, {"resources": {"requests": {"cpu": "4"}, "limits": {"memory": "12Gi"}}, "maxTotalTokens": 8192}
    ),
    # GPUs and sizing
    "tensor-parallel": merged(
        GPU, {"tensorParallelSize": 4, "memFractionStatic": 0.85, "maxRunningRequests": 64}
    ),
    "mig": merged(GPU, {"gpu": {"resourceName": "nvidia.com/mig-3g.40gb"}}),
    "resources": merged(
        GPU,
        {
            "tensorParallelSize": 2,
            "resources": {
                "requests": {"cpu": "16", "memory": "64Gi"},
                "limits": {"nvidia.com/gpu": 2, "memory": "128Gi"},
            },
        },
    ),
    "multi-node": merged(GPU, NODES),
    "multi-node-replicas": merged(GPU, NODES, {"replicas": 3, "multiNode": {"nodes": 4}}),
    "multi-node-keda": merged(GPU, NODES, KEDA),
    "multi-node-policy": merged(GPU, NODES, POLICY),
    # model cache
    "cache-class": merged(GPU, {"cache": {"size": "500Gi", "storageClass": "fast", "keep": False}}),
    "cache-shared": merged(GPU, TWO),
    "cache-claim": merged(
        GPU, {"replicas": 2, "cache": {"type": "existingClaim", "claimName": "models", "readOnly": True}}
    ),
    "cache-emptydir": merged(GPU, {"replicas": 2, "cache": {"type": "emptyDir", "size": "40Gi"}}),
    "cache-hostpath": merged(GPU, {"replicas": 2, "cache": {"type": "hostPath", "hostPath": "/data/models"}}),
    "cache-image": merged(
        GPU,
        {"cache": {"type": "none"}, "model": {"path": "/opt/models/t"}, "draft": {"path": "/opt/models/d"}},
    ),
    # state
    "state": merged(GPU, STATE),
    "state-shared-tenants": merged(
        GPU, TWO, STATE, KEY, speculative("GRAFT", graft={"table": {"scope": "shared"}})
    ),
    "state-hpa": merged(GPU, HPA, STATE, {"state": {"storageClass": "fast", "saveEverySeconds": 60}}),
    # scaling and disruption
    "hpa": merged(GPU, HPA),
    "hpa-usage": merged(GPU, HPA, {"autoscaling": {"tokenUsage": 0.8, "queueDepth": 4}}),
    "keda": merged(GPU, KEDA),
    "keda-usage": merged(
        GPU, KEDA, {"autoscaling": {"tokenUsage": 0.9, "keda": {"authenticationRef": "prom"}}}
    ),
    "pdb-min": merged(GPU, TWO, {"replicas": 4, "pdb": {"minAvailable": 2}}),
    "pdb-percent": merged(GPU, TWO, {"pdb": {"minAvailable": "50%"}}),
    "pdb-off": merged(GPU, {"pdb": {"enabled": False}}),
    # observation
    "watched": merged(GPU, WATCHED),
    "watched-none": merged(PLAIN, WATCHED),
    "metrics-off": merged(GPU, {"metrics": {"enabled": False}}),
    # network
    "service-lb": merged(
        GPU,
        {"service": {"type": "LoadBalancer", "port": 8080, "annotations": {"example.com/internal": "true"}}},
    ),
    "router": merged(GPU, ROUTER),
    "router-all": merged(
        GPU, ROUTER, KEY, POLICY, WATCHED, {"router": {"replicas": 2, "extraArgs": ["--log-level", "warn"]}}
    ),
    "ingress": merged(
        GPU,
        KEY,
        {"ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "tls"}},
    ),
    "ingress-router": merged(GPU, ROUTER, {"ingress": {"enabled": True, "host": "llm.example"}}),
    "httproute": merged(
        GPU,
        KEY,
        {
            "httpRoute": {
                "enabled": True,
                "parentRefs": [{"name": "gateway", "namespace": "front"}],
                "hostnames": ["llm.example"],
                "timeout": "1h",
            }
        },
    ),
    "network-policy": merged(GPU, POLICY, {"networkPolicy": {"egressHttps": False}}),
    # security and the rest
    "keys": merged(
        GPU,
        KEY,
        {
            "adminApiKey": {"existingSecret": {"name": "keys", "key": "admin"}},
            "image": {"digest": "sha256:" + "0" * 64},
        },
    ),
    "account": merged(GPU, {"serviceAccount": {"create": False, "name": "llm"}}),
    "scheduling": merged(
        GPU,
        {
            "nodeSelector": {"accelerator": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "engine"}},
                }
            ],
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
            "image": {"pullSecrets": ["registry"]},
            "podLabels": {"team": "search"},
            "podAnnotations": {"example.com/note": "x"},
        },
    ),
    "extras": merged(
        GPU,
        {
            "extraArgs": ["--log-requests", "--reasoning-parser", "qwen3"],
            "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "extraObjects": [
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": "{{ .Release.Name }}-more"},
                    "data": {"a": "b"},
                }
            ],
        },
    ),
    "slow-start": merged(
        GPU,
        {
            "probes": {
                "startupBudgetSeconds": 3605,
                "healthCheckTimeoutSeconds": 60,
                "liveness": {"timeoutSeconds": 65, "periodSeconds": 70},
            },
            "drain": {"preStopSeconds": 15, "gracePeriodSeconds": 1800},
        },
    ),
    "long-name": merged(
        GPU, {"fullnameOverride": "a-name-that-is-far-longer-than-any-object-may-have-with-suffix"}
    ),
}

# name: (values, parts that the message must have)
REFUSED: dict[str, tuple[Values, tuple[str, ...]]] = {
    "tree-for-specblock": (merged(GPU, speculative("SPECBLOCK", steps=4)), ("/speculative/steps", "null")),
    "blockpilot-settings-for-specblock": (
        merged(GPU, speculative("SPECBLOCK", blockpilot={"policy": "ewma"})),
        ("/speculative/blockpilot",),
    ),
    "specblock-from-a-hub": (
        merged(GPU, speculative("SPECBLOCK"), {"draft": {"path": "example/draft"}}),
        ("draft.path is example/draft", "name a folder"),
    ),
    "state-of-specblock": (merged(GPU, STATE, speculative("SPECBLOCK")), ("SPECBLOCK has no state",)),
    "unknown-algorithm": (
        merged(GPU, speculative("MEDUSA")),
        ("MEDUSA is not known", "BLOCKPILOT, EAGLE3, GRAFT, SPECBLOCK, none"),
    ),
    "no-image": (
        merged(GPU, {"image": {"repository": ""}}),
        ("image.repository is empty", "deploy/docker/Dockerfile"),
    ),
    "no-tag": (merged(GPU, {"image": {"tag": ""}}), ("image.tag and image.digest are empty",)),
    "latest": (merged(GPU, {"image": {"tag": "latest"}}), ("image.tag is latest", "restart")),
    "bad-digest": (merged(GPU, {"image": {"digest": "sha256:12"}}), ("/image/digest", "pattern")),
    "no-model": (merged(IMAGE, speculative("none")), ("model.path is empty",)),
    "no-draft": (
        merged(GPU, {"draft": {"path": ""}}),
        ("draft.path is empty: GRAFT needs a draft", "/models/target"),
    ),
    "unused-draft": (
        merged(GPU, speculative("none")),
        ("draft.path is /models/draft", "algorithm is none"),
    ),
    "draft-is-target": (merged(GPU, {"draft": {"path": "/models/target"}}), ("cannot be its own draft",)),
    "tree-without-speculation": (
        merged(PLAIN, speculative("none", slots=16)),
        ("/speculative/slots", "null"),
    ),
    "graft-settings-for-eagle3": (
        merged(GPU, speculative("EAGLE3", graft={"rule": "value"})),
        ("/speculative/graft",),
    ),
    "tree-for-blockpilot": (merged(GPU, speculative("BLOCKPILOT", topk=4)), ("/speculative/topk", "null")),
    "graft-settings-for-blockpilot": (
        merged(GPU, speculative("BLOCKPILOT", graft={"rule": "value"})),
        ("/speculative/graft",),
    ),
    "state-of-blockpilot": (merged(GPU, STATE, speculative("BLOCKPILOT")), ("BLOCKPILOT has no state",)),
    "unknown-graft-setting": (
        merged(GPU, speculative("GRAFT", graft={"rul": "value"})),
        ("/speculative/graft", "rul"),
    ),
    "graft-chain": (
        merged(GPU, speculative("GRAFT", topk=1, steps=4, slots=5)),
        ("speculative.topk is 1", "EAGLE3"),
    ),
    "chain-of-wrong-length": (
        merged(GPU, speculative("EAGLE3", topk=1, steps=4, slots=16)),
        ("a chain of 5 slots, not 16",),
    ),
    "tree-without-nodes": (
        merged(GPU, speculative("EAGLE3", topk=2, steps=2, slots=16)),
        ("speculative.slots is 16", "only 7"),
    ),
    "two-calibrations": (
        merged(GPU, speculative("GRAFT", graft={"calibration": "/a"}, calibration={"configMap": "b"})),
        ("both set",),
    ),
    "calibrated-eagle3": (
        merged(GPU, speculative("EAGLE3", calibration={"configMap": "b"})),
        ("EAGLE3 does not read one",),
    ),
    "state-of-eagle3": (merged(GPU, STATE, speculative("EAGLE3")), ("EAGLE3 has no state",)),
    "private-state": (merged(GPU, STATE, KEY), ("would store nothing", "scope is shared")),
    "state-of-groups": (
        merged(GPU, STATE, speculative("GRAFT", graft={"table": {"scope": "group"}})),
        ("would store nothing", "scope request or group"),
    ),
    "state-of-nodes": (merged(GPU, NODES, STATE), ("state.enabled with multiNode",)),
    "tp-over-nodes": (
        merged(GPU, NODES, {"multiNode": {"nodes": 3}}),
        ("tensorParallelSize 16 cannot be split over multiNode.nodes 3",),
    ),
    "gpus-and-tp": (
        merged(GPU, {"tensorParallelSize": 4, "resources": {"limits": {"nvidia.com/gpu": 6}}}),
        ("6 GPUs", "multiple of tensorParallelSize 4"),
    ),
    "no-gpu": (
        merged(GPU, {"resources": {"limits": {"memory": "64Gi"}}}),
        ("no limits.nvidia.com/gpu", "device: cpu"),
    ),
    "gpu-on-cpu": (merged(CPU, {"resources": {"limits": {"nvidia.com/gpu": 1}}}), ("device is cpu",)),
    "nodes-on-cpu": (
        merged(CPU, {"tensorParallelSize": 2, "multiNode": {"enabled": True}}),
        ("multiNode.enabled with device cpu",),
    ),
    "one-claim-many-pods": (
        merged(GPU, {"replicas": 2}),
        ("cache.accessModes is ReadWriteOnce", "2 pods", "ReadWriteMany"),
    ),
    "one-claim-autoscaled": (merged(GPU, HPA, {"cache": {"accessModes": ["ReadWriteOnce"]}}), ("6 pods",)),
    "endless-emptydir": (
        merged(GPU, {"cache": {"type": "emptyDir", "size": ""}}),
        ("emptyDir without cache.size",),
    ),
    "claim-without-name": (merged(GPU, {"cache": {"type": "existingClaim"}}), ("cache.claimName is empty",)),
    "host-without-path": (merged(GPU, {"cache": {"type": "hostPath"}}), ("cache.hostPath is empty",)),
    "unmounted-model": (merged(GPU, {"cache": {"type": "none"}}), ("below /models", "not mounted")),
    "empty-and-read-only": (merged(GPU, {"cache": {"readOnly": True}}), ("starts empty",)),
    "hpa-and-keda": (
        merged(GPU, {"autoscaling": {"mode": "hpa+keda"}}),
        ("/autoscaling/mode", "'hpa', 'keda'"),
    ),
    "keda-without-prometheus": (
        merged(GPU, SHARED, {"autoscaling": {"mode": "keda"}}),
        ("autoscaling.keda.prometheusAddress is empty",),
    ),
    "scaled-without-metrics": (
        merged(GPU, HPA, {"metrics": {"enabled": False}}),
        ("hpa needs metrics.enabled",),
    ),
    "scaled-to-nothing": (
        merged(GPU, KEDA, {"autoscaling": {"minReplicas": 0}}),
        ("nothing would ever start",),
    ),
    "scaled-backwards": (
        merged(GPU, HPA, {"autoscaling": {"minReplicas": 9}}),
        ("minReplicas 9 is above autoscaling.maxReplicas 6",),
    ),
    "short-grace": (
        merged(GPU, {"drain": {"preStopSeconds": 10, "gracePeriodSeconds": 30}}),
        ("drain.gracePeriodSeconds 30", "cut off"),
    ),
    "impatient-liveness": (
        merged(GPU, {"probes": {"liveness": {"timeoutSeconds": 1}}}),
        ("probes.liveness.timeoutSeconds 1", "healthCheckTimeoutSeconds 20"),
    ),
    "pdb-of-all": (merged(GPU, {"pdb": {"minAvailable": 1}}), ("pdb.minAvailable 1 of 1", "drained")),
    "rules-without-metrics": (
        merged(GPU, WATCHED, {"metrics": {"enabled": False}}),
        ("metrics.rules.enabled needs metrics.enabled",),
    ),
    "two-doors": (
        merged(
            GPU,
            {
                "ingress": {"enabled": True, "host": "a.example"},
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
            },
        ),
        ("ingress and httpRoute are both enabled",),
    ),
    "ingress-of-all-hosts": (merged(GPU, {"ingress": {"enabled": True}}), ("ingress.host is empty",)),
    "route-without-gateway": (
        merged(GPU, {"httpRoute": {"enabled": True}}),
        ("httpRoute.parentRefs is empty",),
    ),
    "closed-policy": (merged(GPU, {"networkPolicy": {"enabled": True}}), ("nobody could send a request",)),
    "unscrapable": (
        merged(GPU, WATCHED, POLICY, {"networkPolicy": {"metricsFrom": []}}),
        ("networkPolicy.metricsFrom",),
    ),
    "no-account": (merged(GPU, {"serviceAccount": {"create": False}}), ("serviceAccount.name is empty",)),
    "own-flag": (
        merged(GPU, {"extraArgs": ["--tp-size=8"]}),
        ("extraArgs has --tp-size", "tensorParallelSize"),
    ),
    "key-in-plain-text": (
        merged(GPU, {"extraArgs": ["--api-key", "hunter2"]}),
        ("extraArgs has --api-key", "apiKey.existingSecret"),
    ),
    "own-variable": (
        merged(GPU, {"extraEnv": [{"name": "HF_TOKEN", "value": "x"}]}),
        ("extraEnv has HF_TOKEN", "hfToken.existingSecret"),
    ),
    "unknown-value": (merged(GPU, {"modle": {"path": "x"}}), ("modle", "not allowed")),
    "wrong-type": (merged(GPU, {"replicas": "two"}), ("/replicas", "integer")),
}
