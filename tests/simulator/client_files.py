"""One run as every benchmark client writes it: 100 requests of 256 + 128 tokens, 16 at a time."""

import json


def statistics(mean: float, median: float, p99: float, total: float = 0.0) -> dict:
    """A distribution of GuideLLM."""
    return {"successful": {"mean": mean, "median": median, "percentiles": {"p99": p99}, "total_sum": total}}


def figure(average: float, median: float | None = None, p99: float | None = None) -> dict:
    """A figure of AIPerf."""
    return {"unit": "x", "avg": average, "p50": median, "p99": p99}


SERVED = {
    "request_rate": "inf", "max_concurrency": 16, "duration": 16.6667, "completed": 100, "total_input_tokens": 25600,
    "total_output_tokens": 12800, "request_throughput": 6.0, "output_throughput": 768.0, "mean_ttft_ms": 180.0,
    "median_ttft_ms": 175.0, "p99_ttft_ms": 230.0, "mean_tpot_ms": 19.6, "median_tpot_ms": 19.6, "p99_tpot_ms": 25.0,
    "mean_itl_ms": 45.0, "median_itl_ms": 44.0, "p99_itl_ms": 60.0,
}  # fmt: skip
VLLM = SERVED | {"total_token_throughput": 2304.0}  # vllm bench serve --save-result, 0.11
SPEC = {
    "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": 4000,
    "spec_decode_draft_tokens": 12000, "spec_decode_accepted_tokens": 6000,
    "spec_decode_per_position_acceptance_rates": [0.7, 0.5, 0.3],
}  # fmt: skip
SGLANG = SERVED | {  # sglang.bench_serving --output-file, 0.5
    "backend": "sglang", "mean_e2e_latency_ms": 2670.0, "median_e2e_latency_ms": 2600.0, "concurrency": 16.02,
    "accept_length": 2.5,
}  # fmt: skip
SGLANG_DRAFTS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
BATCH = {  # sglang.bench_one_batch_server --result-filename, 0.5
    "run_name": "default", "batch_size": 8, "input_len": 1024, "output_len": 101, "latency": 2.5,
    "input_throughput": 16384.0, "output_throughput": 404.0, "overall_throughput": 3600.0, "last_ttft": 0.5,
    "last_gen_throughput": 410.0, "acc_length": 2.2,
}  # fmt: skip
LATENCY = {"avg_latency": 2.0, "latencies": [2.0], "percentiles": {"50": 2.0}}  # vllm bench latency
GUIDELLM = {
    "config": {"backend": {"model": "org/model"}},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 16}},
            "metrics": {
                "request_totals": {"successful": 100},
                "requests_per_second": statistics(6.0, 6.0, 7.8),
                "output_tokens_per_second": statistics(768.0, 768.0, 900.0),
                "tokens_per_second": statistics(2304.0, 2304.0, 2500.0),
                "request_latency": statistics(2.67, 2.6, 3.5),
                "prompt_token_count": statistics(256.0, 256.0, 256.0, 25600.0),
                "output_token_count": statistics(128.0, 128.0, 128.0, 12800.0),
                "time_to_first_token_ms": statistics(180.0, 175.0, 230.0),
                "time_per_output_token_ms": statistics(20.9, 20.9, 27.0),  # with the first token, which TPOT leaves out
                "inter_token_latency_ms": statistics(19.6, 19.5, 25.0),
            },
        }
    ],
}
AIPERF = {
    "aiperf_version": "0.13.0",
    "request_throughput": figure(6.0),
    "output_token_throughput": figure(768.0),
    "benchmark_duration": figure(100 / 6),
    "request_count": figure(100),
    "total_isl": figure(25600),
    "total_osl": figure(12800),
    "request_latency": figure(2670.0, 2600.0, 3500.0),
    "time_to_first_token": figure(180.0, 175.0, 230.0),
    "inter_token_latency": figure(19.6, 19.5, 25.0),
    "inter_chunk_latency": figure(45.0, 44.0, 60.0),
    "input_config": {"models": ["org/model"], "phases": [{"concurrency": 16}]},
}
AIPERF_DRAFTS = AIPERF | {
    "spec_decode_token_weighted_acceptance_length": figure(2.5),
    "spec_decode_overall_draft_acceptance_rate": figure(50.0),
    "total_spec_decode_steps": figure(4000),
    "total_accepted_draft_tokens": figure(6000),
    "total_draft_tokens": figure(12000),
}
TENSORRT_LLM = """[I] = REQUEST DETAILS
Number of requests:             100
Number of concurrent requests:  16.0200
Average Input Length (tokens):  256.0000
Average Output Length (tokens): 128.0000
= PERFORMANCE OVERVIEW
Request Throughput (req/sec):                     6.0000
Total Output Throughput (tokens/sec):             768.0000
Total Token Throughput (tokens/sec):              2304.0000
Total Latency (ms):                               16666.6667
Average request latency (ms):                     2670.0000
Average time-to-first-token [TTFT] (ms):          180.0000
Average time-per-output-token [TPOT] (ms):        19.6000
[AL] MINIMUM: 2.05
[AL] AVERAGE: 2.50
"""
SUMMARY = VLLM | {name: value for name, value in SPEC.items() if not isinstance(value, list)}  # a line of a table
CLIENTS = {
    "guidellm.json": json.dumps(GUIDELLM),
    "aiperf.json": json.dumps(AIPERF),
    "tensorrt-llm.txt": TENSORRT_LLM,
    "vllm.json": json.dumps([VLLM | SPEC]),
    "vllm.csv": f"{','.join(SUMMARY)}\n{','.join(map(str, SUMMARY.values()))}\n",
}
