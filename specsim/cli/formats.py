"""Types of the --json outputs, for specsim schema: dataclasses where an output has their fields, else TypedDicts.

Annotated[Kind, "names"] has these fields and properties of a dataclass; "+names" all fields and these properties;
"-names" all fields but these. A class behind it adds its keys.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from specsim.acceptance.draft_difference import DraftDifference
from specsim.acceptance.prediction import LengthPrediction, LengthPredictions
from specsim.acceptance.record_prediction import ExpectedLength
from specsim.acceptance.study import Study
from specsim.bench.roofline import Peaks, RooflineBound
from specsim.bench.row import Check, PerformanceTarget, Timing
from specsim.bench.session import Result
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.metrics import Acceptance, Latency
from specsim.correctness.conformance.report import ConformanceReport
from specsim.correctness.conformance.runner import CaseOutcome
from specsim.correctness.differential.result import CellResult, GridResult
from specsim.correctness.exact.report import Certificate, Certificates
from specsim.correctness.explain import AnswerComparison
from specsim.correctness.faults.campaign import CatalogueResult
from specsim.correctness.faults.fault import Fault, FaultFinding
from specsim.correctness.invariance.solo import SoloComparison
from specsim.correctness.parity.comparison import Parity
from specsim.correctness.probe.report import ProbeReport
from specsim.correctness.soak.session import Soak
from specsim.correctness.statistics.report import SamplingTest, SamplingTests
from specsim.explorer.page_data import ExplorationKeys
from specsim.explorer.rounds import RoundsSource
from specsim.serving.adaptation import Switching
from specsim.serving.outputs import Output
from specsim.serving.requests import Request
from specsim.serving.serve import Audit
from specsim.serving.trace import Trace
from specsim.simulator.acceptance_record import AcceptanceRecord
from specsim.simulator.calibration.benchmark_file import BenchmarkSource
from specsim.simulator.calibration.profile import ChainAcceptance, ServerStructure
from specsim.simulator.calibration.published_report import Regret
from specsim.simulator.calibration.server_fit import FittedCell
from specsim.simulator.cell import Cell
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.lint import Finding as Verdict
from specsim.simulator.plan import BatchChoice, Candidate, SettingPlan
from specsim.simulator.reproduce.reproduction import Figure, Reproduction
from specsim.simulator.results import ATTAINMENT, GOODPUT, METRICS
from specsim.simulator.scenario import SpeedupRange
from specsim.simulator.show import Took
from specsim.simulator.slo import HighestRate

Metrics = dict[Literal[METRICS], float | None]
Impl = Literal["reference", "fast"]


class Versions(TypedDict):
    """Versions of the software and the GPU of a run."""

    python: str  # version of Python
    specsim: str  # version of specsim
    torch: str  # version of PyTorch
    triton: NotRequired[str]  # version of Triton; missing where it is not installed
    gpu: NotRequired[str]  # name of the GPU; on cuda only
    code: NotRequired[dict[str, str]]  # digest of each module that the fast implementation runs; on cuda only


class Dated(TypedDict):
    """Command and time of a run."""

    command: str  # command line that gives the same result; empty for one cell of diff
    date: str  # date and time of the run in UTC, ISO 8601, to the second


class Provenance(Dated):
    """Command, time and versions of a run."""

    versions: Versions


class OnDevice(Provenance):
    """Provenance of a run on one device."""

    device: str  # device of the implementation: cpu or cuda


class RunDuration(TypedDict):
    """Duration of a run."""

    seconds: float  # wall-clock time, without loading, in seconds


class SettingJson(TypedDict):
    """Setting of speculation; null where it is unknown."""

    topk: int | None  # draft tokens kept at each step (K); 1 is a chain
    num_steps: int | None  # draft steps, the depth of the tree (S); 0 is plain decoding
    num_draft_tokens: int | None  # nodes of the tree that the target verifies, root included (N)


class PositionJson(TypedDict):
    """A draft position."""

    position: int  # number of the draft, from 1
    unconditional: float  # share of all rounds that accept this draft
    conditional: float | None  # share of the rounds that proposed it; null where no round did
    accepted: int | None  # rounds that accepted it; null without counts
    reached: int | None  # rounds that proposed it behind accepted drafts; null without counts


class RecordKeys(TypedDict):
    """Keys of an acceptance record that are no fields of it."""

    setting: SettingJson
    positions: list[PositionJson]  # rates by position; empty if unknown
    undrafted_rounds: int | None  # further rounds, without drafts, as far as the tool counts them; null if unknown


AcceptanceJson = Annotated[
    AcceptanceRecord,
    "source tool convention pair prompts temperature rounds accept_length reported_length reported_rounding "
    "proposed_drafts interval is_by_request counts shares",
    RecordKeys,
]


class PredictRecordJson(TypedDict):
    """Output of specsim predict --acceptance --json."""

    record: AcceptanceJson
    assumed: list[str]  # assumptions about what the record does not say
    rows: list[ExpectedLength]  # accept lengths by setting


class PredictKeys(TypedDict):
    """Keys of the output of predict that are no fields of its result."""

    rows: list[Annotated[LengthPrediction, "+error"]]  # predictions and measurements by setting
    target_error: float  # largest mean error that gives exit status 0


class CheckDifference(TypedDict):
    """Key of an equality check that failed."""

    difference: NotRequired[str]  # difference in words; only where the check failed


class BenchRowJson(TypedDict):
    """One operation under one setting."""

    name: str  # name of the operation
    group: str  # group of the suite
    setting: dict[str, Any]  # setting by name
    # equality checks by implementation; ours is that of specsim.fast
    checks: dict[str, Annotated[Check, "compared error limit passed", CheckDifference]]
    timings: dict[str, Timing]  # times by implementation; only where the check passed
    # time that no implementation can avoid; null for none
    roofline_bound: Annotated[RooflineBound, "bytes operations parts"] | None
    roofline_bound_us: float | None  # time of the bound at the measured peaks, in microseconds
    time_over_bound: float | None  # our median time over that of the bound
    targets: list[Annotated[PerformanceTarget, "+reached"]]  # figures with an upper limit
    notes: list[str]  # remarks
    figures: dict[str, float]  # figures in addition to times, by name; {} where the check failed


class BenchKeys(TypedDict):
    """Output of specsim bench --json; it is rewritten after every row."""

    suite: str  # name of the suite
    shape: str  # shape of the model
    versions: Versions
    measured_peaks: Peaks | None  # peaks that were measured in this run; null without a GPU
    is_quick: bool  # whether the run had --quick
    rows: list[BenchRowJson]  # rows in the order of the run


class ParameterJson(TypedDict):
    """A parameter of a calibrated server."""

    value: float  # fitted value, in the unit
    low: float  # lower end of the 90 % interval
    high: float  # upper end of the 90 % interval
    unit: str  # unit of the value
    is_determined: bool  # whether the cells determine it; it stays near an assumed value otherwise


class FitProvenance(TypedDict):
    """Origin of a profile."""

    tool: str  # program and version that fitted
    date: NotRequired[str]  # date of the fit, UTC
    model: str  # name of the model
    hardware: str  # name of the GPU
    tensor_parallel: NotRequired[int]  # number of GPUs that share the model
    files: NotRequired[list[BenchmarkSource]]  # files of the cells
    cells: int  # number of cells
    determined: NotRequired[list[str]]  # names of the determined parameters
    tables: NotRequired[list[str]]  # published tables of a shipped profile
    shares_of: NotRequired[str | None]  # engine whose tables give the shares of peaks; null: the profile's own
    notes: NotRequired[list[str]]  # assumptions about what the tables do not say
    doubts: NotRequired[list[str]]  # reasons to doubt the fit


class ProfileKeys(TypedDict):
    """A calibrated server, as calibrate --out writes it."""

    name: str  # name of the profile
    confidence: float  # confidence of the intervals
    parameters: dict[str, ParameterJson]  # parameters by name
    covariance: list[list[float]]  # covariance of the parameters' logarithms
    discrepancy: float  # relative error of the model itself
    acceptance: ChainAcceptance | None  # acceptance of the cells' chains; null without chains
    provenance: FitProvenance


class NamedFormat(TypedDict):
    """Key that names a format inside another."""

    schema: str  # name and version of the profile's format


class BatchError(TypedDict):
    """Error of one batch size under a fit to the others."""

    batch: int  # batch size that was left out
    worst_error: float  # largest relative error


class StructureObjective(TypedDict):
    """Objective of the fit of one structure."""

    objective: float  # objective of its fit; lower is better


class CalibrateJson(TypedDict):
    """Output of specsim calibrate --json."""

    profile: Annotated[ProfileKeys, ServerStructure, NamedFormat]
    cells: list[Annotated[FittedCell, "+error"]]  # fitted figures
    left_out: list[BatchError]  # errors of each batch size under a fit to the others
    left_out_mean_error: float | None  # mean of these errors; null with a single batch size
    structures: list[Annotated[ServerStructure, "schedule graphs", StructureObjective]]  # structures that were tried
    doubts: list[str]  # reasons to doubt the calibration


class HeldOutFigure(TypedDict):
    """A held-out figure."""

    figure: str  # setting and figure
    measured: float  # published value
    predicted: float  # predicted value
    half_width: float  # half-width of the 90 % band; 0.1 is 10 %


class HeldOutJson(TypedDict):
    """Predictions of a published table."""

    table: str  # name of the table
    fitted_cells: list[str]  # cells that the calibration saw
    mean_error: float  # mean relative error of held-out figures
    worst_error: float  # largest relative error
    is_within_target: bool | None  # whether both are within their targets; null without one
    is_doubted: bool  # whether the calibration doubts its cells
    uncalibrated_mean_error: float  # mean error with assumed parameters, without any calibration
    uncalibrated_worst_error: float  # largest error with assumed parameters
    formula_mean_error: float  # mean error of the closed formula
    formula_worst_error: float  # largest error of the closed formula
    coverage: float  # share of held-out figures within their bands
    figures: list[HeldOutFigure]  # held-out figures


class LeftOutJson(HeldOutJson):
    """Predictions of a published table from other tables."""

    engine: str  # profile of the table's engine
    others: list[str]  # tables that were fitted


class Bands(TypedDict):
    """Bands of many figures."""

    confidence: float  # nominal share of the bands
    coverage: float  # share of all held-out figures within their bands
    median_half_width: float  # median half-width of the bands


class MethodRegret(TypedDict):
    """Regret of a method over all choices."""

    mean: float  # mean regret
    worst: float  # largest regret


class CalibratePublishedJson(TypedDict):
    """Output of specsim calibrate --published --json."""

    six_cells: list[HeldOutJson]  # tables calibrated on six cells
    left_out_tables: list[LeftOutJson]  # tables predicted from others
    bands: Bands
    speedup_bands: Bands  # bands of measured speed-ups
    choices: list[Regret]  # choices by table and batch size
    regrets: dict[str, MethodRegret]  # regret by method


class CounterexampleJson(TypedDict):
    """Input on which a rule of a user has another distribution than the target's; null without one."""

    tokens: list[int]  # tokens of the draft tree; the root's is not read: [num_draft_tokens]
    parents: list[int]  # parent of each node, -1 for the root: [num_draft_tokens]
    target_prob: list[list[str]]  # distribution after every node, as exact fractions
    draft_prob: list[list[str]] | None  # distribution after every node, as exact fractions
    uniforms: list[tuple[str, str]]  # region of each uniform random number of acceptance, as exact fractions
    final_uniform: tuple[str, str]  # both ends of the interval, as exact fractions
    result: str  # result of the rule in that region, in words


class ExactFigures(TypedDict):
    """Figures of a certificate, as exact fractions and as numbers."""

    total_variation: str  # total variation from the target's distribution of num_steps + 1 tokens
    accepted: str  # expected accepted drafts per round
    optimum: str  # largest expectation that a lossless rule can reach
    gap: NotRequired[str]  # optimum minus accepted; missing unless the verifier is lossless
    impossible: str  # probability of outputs that the target never gives
    uniform_bits_bound: str  # bound on the total variation added by uniform random numbers of 24 bits
    total_variation_float: float  # total_variation as a number
    accepted_float: float  # accepted as a number
    optimum_float: float  # optimum as a number
    gap_float: NotRequired[float]  # gap as a number
    impossible_float: float  # impossible as a number
    uniform_bits_bound_float: float  # uniform_bits_bound as a number
    counterexample: CounterexampleJson | None


class CertifyKeys(TypedDict):
    """Output of specsim certify --json."""

    command: str  # command line that gives the same result
    versions: Versions
    is_ok: bool  # whether every verifier is as promised
    # certificates, those of controls included
    certificates: list[Annotated[Certificate, "verifier promise impl case regions is_as_promised", ExactFigures]]


class ConformanceKeys(Provenance):
    """Output of specsim conformance --json."""

    outcomes: list[Annotated[CaseOutcome, "+passed"]]  # outcomes of all cases


class DiffKeys(TypedDict):
    """Output of specsim diff --json; it is rewritten after every cell."""

    command: str  # command line of the whole grid; empty for one cell
    versions: Versions
    cells: int  # cells that were run
    failures: list[str]  # reasons for exit status 1, in words; empty if there are none
    results: list[CellResult]  # results of the cells


class ExplainJson(TypedDict):
    """Output of specsim explain --json."""

    a: str  # file of one engine's answers
    b: str  # file of the other engine's answers
    dtype: str  # data type of both engines
    findings: list[AnswerComparison]  # findings in the order of the requests
    drafts: DraftDifference | None  # accepted drafts of both; null where one counts none, or where texts differ


class ParityKeys(TypedDict):
    """Output of specsim parity --json."""

    engine: str  # file or folder of the engine's tensors
    dtype: str  # data type of the engine's arithmetic
    not_compared: list[str]  # names of the dump that the reference does not have


class FaultKeys(TypedDict):
    """Result for one fault."""

    detected: bool  # whether the check detects it, and finds nothing without it
    detected_by: str | None  # field that identifies it; null for none
    first_divergence: FaultFinding | None  # finding that identifies the fault; null for none
    detected_as_named: bool  # whether a field that its entry names detects it
    check: str  # name of the check
    setting: dict[str, Any]  # setting of the check
    fields: list[str]  # fields that the check found wrong
    fields_without_fault: list[str]  # fields that it found wrong without the fault
    seconds: float  # wall-clock time, in seconds


class FaultsKeys(TypedDict):
    """Output of specsim faults --json."""

    versions: Versions
    faults: int  # number of faults
    detected: int  # faults that are detected
    detected_as_named: int  # faults that are detected by a field that their entries name
    # results in the order of the catalogue
    results: list[Annotated[Fault, "name source operation cause symptom code", FaultKeys]]


class Speed(RunDuration):
    """Speed over all requests."""

    tokens: int  # new tokens of all requests
    tokens_per_s: float  # new tokens per second, over all requests


class AcceptanceSource(TypedDict):
    """Source of the acceptance decisions."""

    synthetic: bool  # whether a schedule (--accept-rates) decided in place of the target
    rates: NotRequired[list[float]]  # share of rounds that accept draft 1, 2, ...: [num_steps]
    schedule: NotRequired[Literal["minimum-variance", "independent"]]  # spread of the rates over the rounds
    seed: NotRequired[int]  # seed of the schedule's draws
    rule: NotRequired[str]  # name of a user's acceptance rule that decided in place of the setting's verifier


class PolicyKeys(TypedDict):
    """Settings that a policy chose among; null for one setting."""

    policy: Any  # the policy as an object that --adaptive reads from a file: its settings and fields


class GenerateJson(Dated):
    """Output of specsim generate --json."""

    impl: Impl  # implementation that ran
    dtype: str  # data type of weights and KV
    pair: str  # name of the target and drafter
    outputs: list[Annotated[Output, "-side_outputs"]]  # outputs in the order of the prompts
    metrics: Annotated[Acceptance, Speed]  # acceptance and speed over all outputs
    config: SpecConfig  # setting of speculation; with an adaptive policy the one of most steps
    acceptance: AcceptanceSource
    adaptive: Annotated[Switching, "-policy", PolicyKeys] | None  # settings of a policy; null for one setting


class ServedRequest(TypedDict):
    """Keys of a served request that are no fields of it."""

    id: int  # id of the request
    num_accepted_tokens_per_round: list[int]  # tokens that each round accepted, bonus token included
    prompt_tokens: int  # number of prompt tokens
    prompt_token_ids: list[int]  # tokens of the prompt
    temperature: float  # sampling temperature; 0 is greedy
    # deliveries to the client: step, seconds since the start of the scheduler, and number of new tokens
    emissions: list[tuple[float, float, float]]
    latency: Latency  # latency; null where the output is too short for it


class Totals(Speed):
    """Totals over all requests."""

    requests: int  # number of requests
    finish_reasons: dict[str, int]  # number of requests by finish reason
    steps: int  # steps of the scheduler that did something
    prefill_steps: int  # steps with prefill
    num_prefilled: int  # prompt tokens prefilled, those of preempted requests again each time
    num_reused: int  # prompt tokens whose KV the prefix cache had
    num_preemptions: int  # number of preemptions
    num_aborts: int  # number of aborted requests
    evicted_pages: int  # KV pages that the prefix cache evicted


class SkippedLineJson(TypedDict):
    """A line of the file that is no request."""

    line: int  # number of the line
    reason: str  # what a request would have had there


class ServedJson(TypedDict):
    """One serving run."""

    # outputs in the order of the requests
    outputs: list[
        Annotated[
            Request,
            "arrival priority continues text token_ids logprobs finish_reason stop_reason error num_reused "
            "num_preemptions",
            ServedRequest,
        ]
    ]
    totals: Annotated[Acceptance, Totals]  # totals over all requests
    audit: Audit  # audits of the KV pool, one after every step and one at the end
    config: SpecConfig  # setting of speculation; with an adaptive policy the one of most steps
    acceptance: AcceptanceSource
    adaptive: Annotated[Switching, "-policy", PolicyKeys] | None  # settings of a policy; null for one setting
    serving: ServingConfig
    skipped: list[SkippedLineJson]  # lines of the file that are no requests
    trace: Trace  # steps of the scheduler


class RunKeys(OnDevice):
    """Output of specsim run --json."""

    file: str  # file of the requests
    pair: str  # name of the target and drafter
    impl: Impl  # implementation that ran
    dtype: str  # data type of weights and KV
    kv_dtype: str  # number format of the target's KV: model or fp8_e4m3
    draft_kv_dtype: str  # number format of the drafter's KV: model or fp8_e4m3
    bucket: int | None  # batch size that the fast implementation's buffers hold; null: not given
    batch_invariant: bool  # whether results do not depend on the batch
    graph: str | None  # part of a round that one CUDA graph covers; null for the reference


class ModeName(TypedDict):
    """Name of a mode."""

    mode: str  # name of the mode: schedule and prefix cache


class RunCompareJson(RunKeys):
    """Output of specsim run --compare --json."""

    is_equal: bool  # whether no request differs beyond rounding error
    is_replayed: bool  # whether solo runs repeat the drafts of each mode, which depend on other requests
    num_solo: int  # number of solo runs
    # both schedules, without and with the prefix cache
    modes: list[
        Annotated[SoloComparison, "num_compared num_equal within_rounding_error differences", ModeName, ServedJson]
    ]


class LintReportJson(TypedDict):
    """Output of specsim lint-report --json."""

    file: str  # file of the report
    findings: list[Verdict]  # verdicts of all identities on all runs


class WorkloadFailure(TypedDict):
    """A workload that went wrong."""

    program: str  # name of the workload
    difference: str  # first difference
    command: str  # command line that runs it again


class SoakKeys(TypedDict):
    """Output of specsim soak --json."""

    versions: Versions
    figures: dict[str, float]  # figures of the printed table by name; times in seconds
    failures: list[WorkloadFailure]  # workloads that went wrong


class ChiSquareKeys(TypedDict):
    """Pearson's chi-square statistic."""

    statistic: float | None  # value of the statistic
    degrees_of_freedom: int  # degrees of freedom
    p_value: float | None  # p-value in the limit of many tokens


class TestKeys(TypedDict):
    """Key of a sampling test that is an array in Python."""

    chi_square: ChiSquareKeys


class SamplingTestKeys(TypedDict):
    """Output of specsim sampling-test --json."""

    command: str  # command line that gives the same result
    versions: Versions
    tests: list[Annotated[SamplingTest, "+p_value is_rejected", "-chi_square", TestKeys]]  # tests and controls


class SimulatedSeconds(TypedDict):
    """Duration of a simulated run."""

    seconds: float  # simulated time of the run, in seconds


class SimulatedPolicy(PolicyKeys):
    """Settings that a policy chose among; null for one setting."""

    rounds_by_setting: list[int]  # rounds of requests under each setting


class SimulateJson(TypedDict):
    """Output of specsim simulate --json."""

    model: str  # name of the model
    hardware: str  # name of the GPU
    tensor_parallel: int  # number of GPUs that share the model
    config: SpecConfig
    efficiency: Efficiency
    calibration: str  # origin of the parameters, in words
    simulation_took: dict[str, Took]  # time of the simulation itself by run
    runs: dict[str, Annotated[SimulatedSeconds, Metrics]]  # metrics by run: no drafts and, with a drafter, drafts
    ratios: dict[str, Annotated[SpeedupRange, "value lowest highest"]]  # ratios by metric; empty without a drafter
    profile: str | None  # profile whose parameters are used; null: uncalibrated
    adaptive: SimulatedPolicy | None


class SimulateTableKeys(TypedDict):
    """Output of specsim simulate --table NAME --json."""

    table: str  # name of the table
    figures: list[Annotated[Figure, "+error"]]  # figures side by side


class HighestRates(TypedDict):
    """Highest rates within the objectives."""

    attainment: float  # share of requests that stay within the objectives
    best: HighestRate | None  # the setting of the highest rate
    plain: float | None  # requests per second of plain decoding; null: all may come at once


class OverPlain(TypedDict):
    """Keys of a candidate that are no fields of it."""

    # simulated metrics, means over the replicates; the last two only with objectives
    metrics: Annotated[Metrics, dict[Literal[GOODPUT, ATTAINMENT], NotRequired[float]]]
    over_plain: NotRequired[float]  # speed-up over plain decoding; absent if that was not tried or has no goodput
    band: NotRequired[tuple[float, float]]  # ends of its 90 % band


class PlanKeys(TypedDict):
    """Output of specsim plan --json."""

    candidates: list[Annotated[Candidate, "-metrics", OverPlain]]  # settings, the best first
    by_batch: list[Annotated[BatchChoice, "+speedup span"]]  # best setting by batch size
    highest_rates: HighestRates | None
    sglang: str | None  # flags of SGLang's server; null where it has no such drafter
    vllm: str | None  # flags of vLLM's server; null where no chain was tried
    policies: dict[str, Metrics]  # simulated metrics by policy; empty without --policies


class SweepKeys(TypedDict):
    """Keys of a row of a sweep that are no fields of a cell, or have another type."""

    key: str  # digest of the cell
    shares: str  # probability of acceptance by depth and rank, as JSON text
    efficiency: str  # parameters of the cost model, as JSON text
    kept: str  # parameters of efficiency that keep their defaults whatever the profile says, as JSON text
    prompt_tokens: int | str  # prompt length in tokens; the least and the most as JSON text
    output_tokens: int | str  # output length in tokens; the least and the most as JSON text
    prefix_cache: int  # whether turns of a conversation find the KV of the turns before them: 1 or 0
    adaptive_per_request: int  # whether the policy chooses for every request: 1 or 0
    seed: int | str  # random seed; as JSON text from 2^63 on
    error: str | None  # reason why the cell is impossible; null for none
    seconds: float  # wall-clock time of the simulation, in seconds
    worker: str  # host and process that simulated it


class SweepJson(TypedDict):
    """Output of specsim sweep --json."""

    cells: list[Annotated[Cell, SweepKeys, Metrics]]  # cells in their order
    best: list[Annotated[Cell, SweepKeys, Metrics]]  # best cell of each load, with means over seeds


FORMATS: dict[str, Any] = {
    "accept": Study,
    "acceptance": AcceptanceJson,
    "bench": Annotated[BenchKeys, Annotated[Result, "command date seconds finished unfinished is_complete passed"]],
    "calibrate": CalibrateJson,
    "calibrate-published": CalibratePublishedJson,
    "certify": Annotated[CertifyKeys, Annotated[Certificates, "date seconds failures not_run not_certified"]],
    "conformance": Annotated[ConformanceReport, "-outcomes", ConformanceKeys],
    "diff": Annotated[
        DiffKeys,
        Annotated[
            GridResult, "grid fingerprint num_cells impl device dtype date incomplete_cells coverage first_divergence"
        ],
        Annotated[
            CellResult,
            "decisions within_rounding_error mismatches seconds compared not_compared fields max_logprob_error",
        ],
    ],
    "explain": ExplainJson,
    "exploration": Annotated[ExplorationKeys, RoundsSource],
    "faults": Annotated[FaultsKeys, Annotated[CatalogueResult, "command device date seconds"]],
    "generate": GenerateJson,
    "lint-report": LintReportJson,
    "parity": Annotated[ParityKeys, Parity],
    "plan": Annotated[
        PlanKeys, Annotated[SettingPlan, "cell objective replicates chains schedule slo crossover limits"]
    ],
    "predict": Annotated[LengthPredictions, "+mean_error", "-rows", PredictKeys],
    "predict-record": PredictRecordJson,
    "probe": Annotated[ProbeReport, Dated],
    "profile": Annotated[ProfileKeys, ServerStructure],
    "run": Annotated[RunKeys, ServedJson],
    "run-compare": RunCompareJson,
    "sampling-test": Annotated[
        SamplingTestKeys, Annotated[SamplingTests, "date seconds seed false_alarm is_ok failures"]
    ],
    "simulate": SimulateJson,
    "simulate-table": Annotated[SimulateTableKeys, Annotated[Reproduction, "source method parameters targets notes"]],
    "soak": Annotated[SoakKeys, Annotated[Soak, "command device date is_ok missing programs"]],
    "sweep": SweepJson,
}
