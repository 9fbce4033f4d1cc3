"""Generate with a real vLLM on a CPU: python vllm_run.py JOBS.json RESULTS.json.

Runs in the engine's own environment, where specsim is not. JOBS.json has prompts (token ids), max_new_tokens, and the
arguments of vllm.LLM by the name of each job. A result has token ids, counters of speculation, or an error's last line.
"""

import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,
}


def run(arguments: dict, prompts: list[list[int]], max_new_tokens: int) -> dict:
    """Generate greedily from every prompt."""
    from vllm import LLM, SamplingParams

    start = perf_counter()
    try:
        engine = LLM(**SETTINGS, **arguments)
        loaded = perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        counters = {}
        for metric in engine.get_metrics():
            if metric.name.startswith("vllm:spec_decode_"):
                value = getattr(metric, "values", None)
                counters[metric.name.removeprefix("vllm:spec_decode_")] = metric.value if value is None else value
    except Exception as error:  # whatever an engine raises is its answer
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters,
        "load_seconds": round(loaded - start, 1),
        "generate_seconds": round(perf_counter() - loaded, 1),
    }


def main(jobs_file: str, results_file: str) -> None:
    """Run all jobs, each in a fork of a process that has imported the engine: a run leaves things behind."""
    os.environ.update(ENVIRONMENT)
    from vllm import __version__ as version

    jobs = json.loads(Path(jobs_file).read_text())
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        tasks = [(arguments, jobs["prompts"], jobs["max_new_tokens"]) for arguments in jobs["engines"].values()]
        results = pool.starmap(run, tasks, chunksize=1)
    named = dict(zip(jobs["engines"], results, strict=True))
    Path(results_file).write_text(json.dumps({"vllm": version, "results": named}))


if __name__ == "__main__":
    main(*sys.argv[1:])
