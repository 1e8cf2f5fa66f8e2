"""Every text model class of transformers: planned as transformers sees it, or refused."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import Model, load_model, stack
from kvstow.plan.models.serving import ServingOptions
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window
from kvstow.plan.spec import LayerSpec

cache_utils = pytest.importorskip("transformers.cache_utils")

pytestmark = pytest.mark.filterwarnings("ignore")

SERVING = ServingOptions()
KEEPS_NOTHING = ("mlp", "moe")


@pytest.fixture(scope="module")
def families() -> ModuleType:
    file = Path(__file__).parents[3] / "scripts" / "families.py"
    spec = importlib.util.spec_from_file_location("families", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def configurations(families: ModuleType) -> dict[str, Any]:
    return dict(families.configurations())


def seen_by_transformers(config: Any) -> list[set[Retention]]:
    """What each layer that keeps anything sees, as transformers' own cache has it."""
    text = config.get_text_config(decoder=True)
    types, options = cache_utils.get_layer_types_and_kwargs(text)
    return [
        kept(kind, option)
        for kind, option in zip(types, options, strict=True)
        if kind not in KEEPS_NOTHING
    ]


def kept(kind: str, option: dict[str, Any]) -> set[Retention]:
    match kind:
        case "full_attention" | "indexed_attention":
            return {Full()}
        case "sliding_attention":
            return {Window(option["sliding_window"])}
        case "chunked_attention":
            return {Chunk(option["sliding_window"])}
        case "linear_attention" | "conv":
            return {State()}
        case "hybrid":
            return {Full(), State()}
        case "hybrid_sliding":
            return {Window(option["sliding_window"]), State()}
        case _:
            raise AssertionError(f"a layer type that this test does not know: {kind}")


def seen_by_us(layers: list[tuple[LayerSpec, ...]]) -> list[set[Retention]]:
    return [
        {spec.retention for spec in layer if not isinstance(spec.retention, Encoder)}
        for layer in layers
        if layer
    ]


def planned(facts: dict[str, Any]) -> list[tuple[LayerSpec, ...]] | None:
    """The layers of a model, one tuple per cache that transformers has; None if refused."""
    try:
        config = load_model(facts)
        layers = list(stack(config, SERVING).layers)
    except ModelError:
        return None
    if config.model_type == "longcat_flash":  # two attentions in a layer, two caches there
        return [(spec,) for layer in layers for spec in layer]
    return layers


def differing(name: str, config: Any, facts: dict[str, Any]) -> str | None:
    layers = planned(facts)
    if layers is None or name == "deepseek_v4":
        return None
    ours, theirs = seen_by_us(layers), seen_by_transformers(config)
    return None if ours == theirs else f"{name}: {ours} planned, {theirs} in transformers"


def test_layers_see_what_they_see_in_transformers(
    families: ModuleType, configurations: dict[str, Any]
) -> None:
    wrong = [
        differing(name, config, families.facts(config))
        for name, config in configurations.items()
        if not isinstance(config, Exception)
    ]
    assert [each for each in wrong if each] == []


def test_files_without_layer_types_are_read_alike_or_refused(
    families: ModuleType, configurations: dict[str, Any]
) -> None:
    """With the window switched on where a class has a switch, and before its last layers."""
    wrong: list[str | None] = []
    read: set[str] = set()
    for name, default in configurations.items():
        if isinstance(default, Exception) or getattr(default, "sliding_window", 0) == 0:
            continue
        switches = {
            key: value
            for key, value in {"use_sliding_window": True, "max_window_layers": 3}.items()
            if hasattr(default, key)
        }
        config = type(default)(sliding_window=96, **switches)
        facts = families.facts(config)
        older = {k: v for k, v in facts.items() if k not in ("layer_types", "layers_block_type")}
        wrong.append(differing(name, config, older))
        if planned(older) is not None:
            read.add(name)
    assert [each for each in wrong if each] == []
    assert read >= {"dots1", "qwen2_vl_text", "qwen2_5_vl_text", "olmo3", "exaone4", "smollm3"}
    assert read >= {"mistral", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere2"}


def test_heads_are_as_many_and_as_wide_as_in_transformers(
    families: ModuleType, configurations: dict[str, Any]
) -> None:
    compared = 0
    for name, config in configurations.items():
        layers = None if isinstance(config, Exception) else planned(families.facts(config))
        if layers is None or config.is_encoder_decoder:
            continue
        own = config.get_text_config(decoder=True).per_layer_config
        for layer, its in zip(layers, own, strict=False):
            for spec in layer:
                if [field.name for field in spec.fields] != ["k", "v"]:
                    continue
                heads = getattr(its, "num_key_value_heads", None)
                width = getattr(its, "head_dim", None)
                assert heads is None or spec.heads.size == heads, name
                assert width is None or spec.field("k").shape == (width,), name
                compared += heads is not None
    assert compared > 3000


def test_the_page_of_families_has_a_line_for_each(
    families: ModuleType, configurations: dict[str, Any]
) -> None:
    outcomes = {name: families.outcome(config) for name, config in configurations.items()}
    assert sum(isinstance(each, Model) for each in outcomes.values()) > 150
    page = families.page(outcomes)
    assert [name for name in outcomes if f"\n| `{name}` | " not in page] == []
