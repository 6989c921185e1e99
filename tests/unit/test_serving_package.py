"""The model repository as files: configurations that Triton's own parser reads, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake import drafter_spec, make_bundle
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from dflow_trt.errors import UserError
from dflow_trt.serving import tensors as t
from dflow_trt.serving.package import PackageOptions, config_text, package_bundle, read_share

BUNDLE = make_bundle([drafter_spec("flow", 8, "after_rejection")])
FULL = PackageOptions(
    max_queue=7, timeout=2.5, draft_policy="adaptive", strategy="flow", shares={"ar": 0.25, "flow": 0.1}, threads=3
)


def parsed(model: t.Model, options: PackageOptions | None = None) -> model_config_pb2.ModelConfig:
    return text_format.Parse(config_text(model, options or PackageOptions(), 512), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("model", t.MODELS, ids=lambda model: model.name)
def test_a_configuration_says_what_the_table_says(model: t.Model) -> None:
    config = parsed(model)
    assert (config.name, config.max_batch_size) == (model.name, 1)
    for tensors, found in ((model.inputs, config.input), (model.outputs, config.output)):
        kinds = model_config_pb2.DataType.Name
        assert [(each.name, kinds(each.data_type), tuple(each.dims)) for each in found] == [
            (tensor.name, f"TYPE_{tensor.type}", tensor.dims) for tensor in tensors
        ]
    assert [each.optional for each in config.input] == [tensor.optional for tensor in model.inputs]
    if model is not t.ENSEMBLE:
        assert config.backend == "python"
        assert config.model_transaction_policy.decoupled == model.decoupled


def test_the_ensemble_connects_every_tensor() -> None:
    """Each input of a step is one of the ensemble's or an earlier step's output, and each of its outputs is made."""
    config = parsed(t.ENSEMBLE)
    steps = {model.name: model for model in t.MODELS}
    known = {each.name for each in config.input}
    for step in config.ensemble_scheduling.step:
        model = steps[step.model_name]
        assert set(step.input_map) == {tensor.name for tensor in model.inputs}
        assert set(step.input_map.values()) <= known
        assert set(step.output_map) == {tensor.name for tensor in model.outputs}
        assert not set(step.output_map.values()) & known, "a tensor of an ensemble is written once"
        known |= set(step.output_map.values())
    assert {each.name for each in config.output} <= known


@pytest.mark.parametrize("options", [PackageOptions(), FULL], ids=["default", "all"])
def test_options_survive_the_configuration(options: PackageOptions) -> None:
    config = parsed(t.DFLOW, options)
    given = {name: value.string_value for name, value in config.parameters.items()}
    assert PackageOptions.from_parameters(given) == options
    options.check(BUNDLE)


def test_texts_are_escaped() -> None:
    strategy = 'a "quoted"\\name\nof two lines'
    config = parsed(t.DFLOW, PackageOptions(strategy=strategy))
    assert config.parameters["strategy"].string_value == strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PackageOptions(max_queue=-1), "max_queue: -1"),
        (PackageOptions(timeout=0.0), "timeout: 0"),
        (PackageOptions(timeout=float("nan")), "timeout: nan"),
        (PackageOptions(draft_policy="often"), "draft_policy: 'often'"),  # type: ignore[arg-type]
        (PackageOptions(strategy="medusa"), "strategy: this bundle has no 'medusa'"),
        (PackageOptions(shares={"ar": 2.0}), "strategy share: ar=2"),
    ],
)
def test_options_that_do_not_fit(options: PackageOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        options.check(BUNDLE)


def test_shares_and_parameters_that_cannot_be_read() -> None:
    assert read_share("dflow=0.05") == ("dflow", 0.05)
    for text in ("dflow", "dflow=", "dflow=much"):
        with pytest.raises(UserError, match="NAME=SHARE"):
            read_share(text)
    with pytest.raises(UserError, match=r"config\.pbtxt: parameter max_queue is 'many'"):
        PackageOptions.from_parameters({"max_queue": "many"})


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a bundle"):
        package_bundle(tmp_path, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()
