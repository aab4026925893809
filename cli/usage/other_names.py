"""What options of ours are called by vLLM, SGLang, llama.cpp and mlx-lm.

Rule: the tables in docs/glossary.md and docs/from-*.md say the same; a test compares them.
"""


def name_here(name: str) -> str | None:
    """Return what an option of theirs is called here, with its value if it has one; or None.

    However its words are joined: they have some options with `_`, or both.
    """
    return OTHER_NAMES.get("--" + name.removeprefix("--").replace("_", "-"))


OTHER_NAMES = {
    "--batch-size": "--max-batch-tokens",
    "--cache-prompt": "--prefix-cache on",
    "--chunked-prefill-size": "--max-batch-tokens",
    "--concurrency": "--batch",
    "--context-length": "--max-context",
    "--ctx-size": "--max-context",
    "--data-parallel-size": "--replicas",
    "--decode-concurrency": "--batch",
    "--disable-radix-cache": "--prefix-cache off",
    "--draft-max": "--draft-tokens",
    "--draft-model": "--draft",
    "--enable-chunked-prefill": "--max-batch-tokens",
    "--enable-mixed-chunk": "--prefill-order decode-first",
    "--enable-prefix-caching": "--prefix-cache on",
    "--enable-priority-scheduling": "--preempt-for priority",
    "--goodput": "--slo",
    "--gpu-memory-utilization": "--kv-memory",
    "--long-prefill-token-threshold": "--long-prefill-threshold",
    "--max-concurrency": "--batch",
    "--max-model-len": "--max-context",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--max-num-seqs": "--batch",
    "--max-prefill-tokens": "--max-batch-tokens",
    "--max-running-requests": "--batch",
    "--max-total-tokens": "--kv-blocks",
    "--mem-fraction-static": "--kv-memory",
    "--model-draft": "--draft",
    "--num-draft-tokens": "--draft-tokens",
    "--num-gpu-blocks-override": "--kv-blocks",
    "--page-size": "--block-size",
    "--parallel": "--batch",
    "--prefill-step-size": "--max-batch-tokens",
    "--priority-scheduling-preemption-threshold": "--preempt-for priority",
    "--prompt-cache-size": "--prefix-cache on",
    "--schedule-policy": "--policy",
    "--scheduling-policy": "--policy",
    "--speculative-algorithm": "--draft",
    "--speculative-config": "--draft",
    "--speculative-num-draft-tokens": "--draft-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
}
