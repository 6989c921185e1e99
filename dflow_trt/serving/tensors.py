"""Every tensor of the Triton models: the only place that spells a name. config.pbtxt and the docs come from it.

All models have ``max_batch_size: 1``: shapes are [1, ...] and requests are batched in flight, not by Triton. ``-1``
is a dimension of any size. n is the number of sequences in a response: one in a stream, else
``num_return_sequences``. ``text_output`` alone has the shape [n]: NVIDIA's clients read its element 0 as the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataType = Literal["BOOL", "INT32", "UINT64", "FP32", "STRING"]
ANY = (-1,)


@dataclass(frozen=True)
class Tensor:
    """One tensor. dims: without the batch dimension. neutral: the only value taken of an option that is not offered."""

    name: str
    type: DataType
    meaning: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    neutral: float | bool | None = None


@dataclass(frozen=True)
class Model:
    """One model of the repository, as its config.pbtxt declares it."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool


TEXT_INPUT = Tensor("text_input", "STRING", "The prompt, special tokens spelled out; no chat template.", optional=False)
INPUT_IDS = Tensor("input_ids", "INT32", "Token ids of the prompt.", ANY, optional=False)
MAX_TOKENS = Tensor("max_tokens", "INT32", "The most tokens to emit.", optional=False)
STREAM = Tensor("stream", "BOOL", "A response a round and sequence; else one response with everything.")
NUM_SEQUENCES = Tensor("num_return_sequences", "INT32", "Samples of the prompt.")
STOP = Tensor("stop", "BOOL", "Ends the requests that carry this request's id; the other inputs do not matter.")
STRATEGY = Tensor("strategy", "STRING", "How to decode: ar is plain, others are drafters of the bundle.")
DRAFT_TOKENS = Tensor("draft_tokens", "INT32", "Most drafts verified in a round; 0 is plain decoding.")
TIMEOUT_MS = Tensor("timeout_ms", "INT32", "Milliseconds until the request is ended, queue included.")
PREFIX = Tensor("prefix", "STRING", "Put before the text of each sequence.")
EXCLUDE_INPUT = Tensor("exclude_input_in_output", "BOOL", "false puts the prompt before the text. Default true.")
STOP_WORDS = Tensor("stop_words", "STRING", "The text ends before the first of them.", ANY)
BAD_WORDS = Tensor("bad_words", "STRING", "Texts that must not appear.", ANY)
END_ID = Tensor("end_id", "INT32", "Ends the output in place of the model's own end tokens; -1: nothing does.")
PAD_ID = Tensor("pad_id", "INT32", "Taken and not needed: nothing is padded.")
RETURN_LOG_PROBS = Tensor("return_log_probs", "BOOL", "Give log-probabilities of the tokens.")
LOGPROBS = Tensor("logprobs", "INT32", "The same, and of that many alternatives to each token.")
LOGIT_BIAS_IDS = Tensor("logit_bias_ids", "INT32", "Ids whose logits are changed.", ANY)
LOGIT_BIAS_VALUES = Tensor("logit_bias_values", "FP32", "What is added to them; -inf bans an id.", ANY)
BIAS_WORDS = Tensor("embedding_bias_words", "STRING", "Texts, all of whose tokens get a bias.", ANY)
BIAS_WEIGHTS = Tensor("embedding_bias_weights", "FP32", "The bias of each of these texts.", ANY)

SAMPLING = (
    Tensor("temperature", "FP32", "0, the default, is greedy."),
    Tensor("top_k", "INT32", "0 or -1 is off."),
    Tensor("top_p", "FP32", "1 is off."),
    Tensor("min_p", "FP32", "Relative to the most probable token; 0 is off."),
    Tensor("seed", "UINT64", "Of the random draws; without it one is drawn and reported."),
    Tensor("min_tokens", "INT32", "Nothing ends the output before that many tokens."),
    Tensor("repetition_penalty", "FP32", "Of tokens in prompt or output; 1 is off."),
    Tensor("presence_penalty", "FP32", "Of tokens in the output, once."),
    Tensor("frequency_penalty", "FP32", "Of tokens in the output, for each time."),
    Tensor("ignore_eos", "BOOL", "Go on after the model's end tokens."),
    Tensor("stop_token_ids", "INT32", "Ids that end the output.", ANY),
)
"""Those that are fields of SamplingParams, by the same name."""

NOT_OFFERED = (
    Tensor("beam_width", "INT32", "Beam search is not offered.", neutral=1),
    Tensor("length_penalty", "FP32", "Belongs to beam search.", neutral=1.0),
    Tensor("return_context_logits", "BOOL", "Not offered.", neutral=False),
    Tensor("return_generation_logits", "BOOL", "Not offered; logprobs are.", neutral=False),
    Tensor("return_perf_metrics", "BOOL", "Not offered; what drafts cost and gave is always there.", neutral=False),
)
"""What NVIDIA's clients may send of what is not offered: taken at its neutral value, refused by name otherwise."""

ALWAYS_GIVEN = (
    Tensor("return_num_input_tokens", "BOOL", "Taken; the number is always given."),
    Tensor("return_num_output_tokens", "BOOL", "Taken; the number is always given."),
)

OPTIONS = (
    STREAM,
    *SAMPLING,
    STOP_WORDS,
    BAD_WORDS,
    END_ID,
    PAD_ID,
    RETURN_LOG_PROBS,
    LOGPROBS,
    LOGIT_BIAS_IDS,
    LOGIT_BIAS_VALUES,
    BIAS_WORDS,
    BIAS_WEIGHTS,
    NUM_SEQUENCES,
    STRATEGY,
    DRAFT_TOKENS,
    TIMEOUT_MS,
    STOP,
    *ALWAYS_GIVEN,
    *NOT_OFFERED,
)

TEXT_OUTPUT = Tensor("text_output", "STRING", "n texts: what this response adds to each sequence.", ANY)
OUTPUT_IDS = Tensor("output_ids", "INT32", "New tokens, sequence after sequence.", ANY)
SEQUENCE_INDEX = Tensor("sequence_index", "INT32", "Which of the samples.", ANY)
FINISH_REASON = Tensor(
    "finish_reason", "STRING", "Empty until the sequence's last response: stop, length, cancelled, timeout, error.", ANY
)
NUM_ACCEPTED = Tensor("num_accepted", "INT32", "Accepted drafts among the new tokens.", ANY)
NUM_INPUT_TOKENS = Tensor("num_input_tokens", "INT32", "Tokens of the prompt.", ANY)
NUM_OUTPUT_TOKENS = Tensor("num_output_tokens", "INT32", "Tokens of the sequence so far.", ANY)
NUM_ROUNDS = Tensor("num_rounds", "INT32", "Verify rounds so far.", ANY)
TOTAL_DRAFT_TOKENS = Tensor("total_draft_tokens", "INT32", "Drafts verified so far.", ANY)
TOTAL_ACCEPTED = Tensor("total_accepted_draft_tokens", "INT32", "Drafts accepted so far.", ANY)
ACCEPTANCE_RATE = Tensor("acceptance_rate", "FP32", "The second of these over the first.", ANY)
SEED_USED = Tensor("seed_used", "UINT64", "The seed of the draws, given or drawn.", ANY)
CUM_LOG_PROBS = Tensor("cum_log_probs", "FP32", "Sum of the tokens' log-probabilities so far; 0 if not asked for.", ANY)
OUTPUT_LOG_PROBS = Tensor("output_log_probs", "FP32", "Of each new token; empty if not asked for.", ANY)
TOP_IDS = Tensor("top_ids", "INT32", "logprobs alternatives to each new token, most probable first.", ANY)
TOP_LOG_PROBS = Tensor("top_log_probs", "FP32", "Their log-probabilities.", ANY)

FIGURES = (
    OUTPUT_IDS,
    SEQUENCE_INDEX,
    FINISH_REASON,
    NUM_ACCEPTED,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    NUM_ROUNDS,
    TOTAL_DRAFT_TOKENS,
    TOTAL_ACCEPTED,
    ACCEPTANCE_RATE,
    SEED_USED,
    CUM_LOG_PROBS,
    OUTPUT_LOG_PROBS,
    TOP_IDS,
    TOP_LOG_PROBS,
)
"""What dflow tells besides the text."""

TASK_PARAMETER = "task"
"""Request parameter: a label of the metrics."""
HANDLE_PARAMETER = "handle"
"""Request parameter: names one request where an id may name several, for a stop that has it too. An error of such a
request is a last response with the finish_reason error, and the code and the message for its text."""

PREPROCESSING = Model("preprocessing", (TEXT_INPUT, EXCLUDE_INPUT), (INPUT_IDS, PREFIX), decoupled=False)
DFLOW = Model("dflow", (INPUT_IDS, PREFIX, MAX_TOKENS, *OPTIONS), (TEXT_OUTPUT, *FIGURES), decoupled=True)
_FRONT_INPUTS = (TEXT_INPUT, MAX_TOKENS, EXCLUDE_INPUT, *OPTIONS)
ENSEMBLE = Model("ensemble", _FRONT_INPUTS, (TEXT_OUTPUT, *FIGURES), decoupled=True)
DFLOW_BLS = Model("dflow_bls", _FRONT_INPUTS, (TEXT_OUTPUT, *FIGURES), decoupled=True)

MODELS = (PREPROCESSING, DFLOW, ENSEMBLE, DFLOW_BLS)
