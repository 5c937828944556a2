"""Fixtures for all tests: tiny random models, bundles of them, and servers, each made once in a
run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pass_runtime  # noqa: F401 - turns ONNX Runtime's telemetry off before tests import that
from once import made_once, shared_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never reach for a model hub
os.environ.setdefault("TQDM_DISABLE", "1")
THREADS = 0
if "PYTEST_XDIST_WORKER" in os.environ:
    THREADS = 1
    # With more threads than cores, torch's would spin while they wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "Über Straßen läuft der Fuchs 12345 times, naïve café.",
    "import numpy as np\nfor i in range(10):\n    print(i)\n",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCAB_SIZE = 320
BOS, EOS = 0, 1
SMOLLM2 = "smollm2-135m"
EXPORTING = ("parity", "exporter", "trainer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="Run the tests marked `seldom`, too.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker runs one alone at the end."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("slow") is None,
            item.path.parent.name not in EXPORTING,
        )
    )
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("seldom")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("seldom")]
    for item in items:
        if item.path.parent.name == "serve":
            item.add_marker(pytest.mark.serve)


class SilentProgress:
    def phase(self, _name: str) -> Callable[[int, int], None]:
        return lambda _done, _total: None


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(directory: Path, model_type: str = "llama", **overrides) -> Path:
    """Save a tiny random model with large weights: logits are far apart, and near-ties rare."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 768,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(sizes | overrides))
    )
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def randomize_vectors(directory: Path) -> None:
    """Biases and norm scales of new models are 0 and 1: a lost one would not be noticed."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(directory)


def export_bundle(model: Path, output: Path, **options) -> Path:
    from pass_exporter.config import ExportConfig
    from pass_exporter.export import export

    return export(ExportConfig(str(model), output=output, **options), SilentProgress()).output


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def traces(shared: Path) -> Iterator[None]:
    """From here on, each architecture is traced once in the run."""
    from traced import traced_once

    with traced_once(shared):
        yield


@pytest.fixture(scope="module", autouse=True)
def traces_of_exports(request: pytest.FixtureRequest) -> None:
    if request.path.parent.name in EXPORTING:
        request.getfixturevalue("traces")


@pytest.fixture(scope="session")
def tiny_model(shared: Path, traces: None) -> Path:
    return made_once(shared / "tiny-llama", make_model)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: Path, shared: Path) -> Path:
    """L=6 and untrained look-ahead embeddings."""
    return made_once(shared / "tiny", lambda output: export_bundle(tiny_model, output, lookahead=6))


@pytest.fixture(scope="session")
def random_bundle(tiny_model: Path, shared: Path) -> Path:
    """L=6 and large random embeddings, whose drafts are mostly wrong."""
    import torch
    from safetensors.torch import save_file

    def make(output: Path) -> None:
        weights = shared / "random.safetensors"
        embeddings = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * 3
        save_file({"lookahead": embeddings}, weights)
        export_bundle(tiny_model, output, lookahead=6, lookahead_weights=weights)

    return made_once(shared / "random", make)


def write_random_weights(
    model: Path,
    path: Path,
    lookahead: int = 6,
    rank: int = 4,
    head_rank: int = 0,
    head_strength: float = 1.0,
) -> Path:
    """Write look-ahead weights, with adapter and head if their ranks are not 0."""
    import torch

    from pass_exporter.model.load import load_model
    from pass_exporter.model.lookahead import TrainingRecord, model_fingerprint, write_lookahead
    from pass_exporter.model.registry import resolve
    from pass_trainer.drafter import new_adapter

    base = load_model(resolve(str(model)), "fp32").model
    generator = torch.Generator().manual_seed(1)
    adapter = new_adapter(base, rank, generator) if rank else None
    with torch.no_grad():
        for b in adapter.lora_B if adapter else ():
            b.normal_(generator=generator)
    head = None
    if head_rank:
        head = random_head(base.get_output_embeddings().weight, head_rank, strength=head_strength)
    sizes = {"rank": rank, "head_rank": head_rank, "head_width": 24 if head_rank else 0}
    kind = "lora" if rank else "none"
    record = TrainingRecord(
        base="tiny", lookahead=lookahead, adapter=kind, **sizes, steps=0, recipe={}, tools={}
    )
    embeddings = torch.randn(lookahead, base.config.hidden_size, generator=generator)
    write_lookahead(path, embeddings, adapter, head, model_fingerprint(base), record)
    return path


def random_head(embeddings, rank: int = 12, width: int = 24, seed: int = 2, strength: float = 1.0):
    """Return a head that moves logits by a few units, times `strength`."""
    import torch

    from pass_exporter.model.draft_head import DraftHead, new_head

    generator = torch.Generator().manual_seed(seed)
    tensors = new_head(embeddings, rank, width, generator).tensors()
    tensors["head.bias"] = torch.randn(width, generator=generator)
    tensors["head.state"] = tensors["head.state"] * 10
    tensors["head.out"] = torch.randn(rank, width, generator=generator) / 2 * strength
    return DraftHead(
        {name.removeprefix("head."): tensor.half() for name, tensor in tensors.items()}, embeddings
    )


@pytest.fixture(scope="session")
def adapter_weights(tiny_model: Path, shared: Path) -> Path:
    return made_once(
        shared / "adapter.safetensors",
        lambda path: write_random_weights(tiny_model, path, lookahead=8),
    )


@pytest.fixture(scope="session")
def adapter_bundle(tiny_model: Path, adapter_weights: Path, shared: Path) -> Path:
    options = {"lookahead": 8, "lookahead_weights": adapter_weights}
    return made_once(
        shared / "adapter", lambda output: export_bundle(tiny_model, output, **options)
    )


@pytest.fixture(scope="session")
def in_format(tiny_model: Path, adapter_weights: Path, shared: Path) -> Callable[[str], Path]:
    """A function from "fp16" or a format of --weights to a bundle with an adapter, L=4."""

    def bundle(name: str) -> Path:
        options = {"dtype": name} if name == "fp16" else {"weights": name}
        options["lookahead_weights"] = adapter_weights
        return made_once(
            shared / f"in-{name}", lambda output: export_bundle(tiny_model, output, **options)
        )

    return bundle


@pytest.fixture(scope="session")
def head_bundle(tiny_model: Path, shared: Path) -> Path:
    """A random adapter and head, L=8; lookahead.safetensors is beside the bundle."""

    def make(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        weights = write_random_weights(
            tiny_model, directory / "lookahead.safetensors", lookahead=8, head_rank=12
        )
        export_bundle(tiny_model, directory / "bundle", lookahead=8, lookahead_weights=weights)

    return made_once(shared / "head", make) / "bundle"


@pytest.fixture(scope="session")
def subset_bundle(shared: Path, traces: None) -> Path:
    """L=4; the head chooses from half of 1024 tokens. model/ and the weights are beside it."""

    def make(directory: Path) -> None:
        model = make_model(directory / "model", vocab_size=1024)
        weights = write_random_weights(
            model, directory / "lookahead.safetensors", lookahead=4, rank=0, head_rank=12
        )
        export_bundle(model, directory / "bundle", lookahead=4, lookahead_weights=weights)

    return made_once(shared / "subset", make) / "bundle"


@pytest.fixture(scope="session")
def rejection_bundle(subset_bundle: Path, shared: Path) -> Path:
    model, weights = (subset_bundle.parent / name for name in ("model", "lookahead.safetensors"))
    options = {"lookahead": 4, "lookahead_weights": weights, "rule": "rejection"}
    return made_once(shared / "rejection", lambda output: export_bundle(model, output, **options))


@pytest.fixture(scope="session")
def smollm2_bundle(shared: Path) -> Path:
    """The default model in fp32, L=4, in PASS_TEST_BUNDLE if that is set."""
    from pass_exporter.config import ExportConfig
    from pass_exporter.export import export
    from pass_runtime import PassError, load

    output = Path(os.environ.get("PASS_TEST_BUNDLE") or shared) / f"{SMOLLM2}-pass4"

    def make(_mark: Path) -> None:
        try:
            load(output, "cpu", verify=False)
        except PassError:  # not there, or of an older version
            report = export(
                ExportConfig(SMOLLM2, lookahead=4, output=output, force=True), SilentProgress()
            )
            assert report.relative_error < 2e-5

    made_once(shared / "smollm2", make)
    return output


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory PASS_CACHE of a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("PASS_CACHE", str(directory))
        yield directory


# Fixtures for tests/serve, which cannot have a conftest.py of its own: the test files import this
# one by its name, and two modules of one name shadow each other.


@pytest.fixture(scope="session")
def server(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Four slots, and a queue that never fills."""
    from running import Server

    with Server(
        random_bundle, tmp_path_factory.mktemp("server") / "log", "--max-batch-size", 4
    ) as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One slot, a queue of one, and 50 ms a pass."""
    from changed_pass_run import slow_pass_run
    from running import Server

    arguments = ("--max-batch-size", 1, "--max-queue", 1)
    log = tmp_path_factory.mktemp("slow-server") / "log"
    with Server(random_bundle, log, *arguments, command=slow_pass_run(0.05)) as running:
        yield running


@pytest.fixture(scope="session")
def triton_server(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The models `text` and `tokens` (4 slots), and `slow` (2 slots, 30 ms a pass). After SIGTERM
    requests have 1 s."""
    from triton_server import SLOW, Triton, require_triton

    from pass_exporter.triton import RepositoryConfig, write_model

    require_triton()
    directory = tmp_path_factory.mktemp("triton")
    for name, slots in (("text", 4), ("tokens", 4), ("slow", 2)):
        with_tokens = name == "tokens"
        config = RepositoryConfig(
            random_bundle,
            directory / "models",
            served_model_name=name,
            parameters={"max_batch_size": slots, "threads": 1, "drain_seconds": 1},
            tokens=with_tokens,
            copy=with_tokens,
        )
        if (model := write_model(config)).name == "slow":
            with (model / "1" / "model.py").open("a") as file:
                file.write(SLOW)
    polling = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with Triton(directory / "models", directory / "log", *polling) as running:
        yield running


@pytest.fixture(scope="session")
def session(random_bundle: Path) -> Iterator:
    """Of the bundle of `server`."""
    from pass_runtime import load

    with load(random_bundle, threads=1) as opened:
        yield opened
