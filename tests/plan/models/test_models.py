"""From a configuration to the layers of one rank."""

from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import KvstowError
from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.models.catalogue import entries
from kvstow.plan.retention import Full, Window

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


KEYS = sorted({key for entry in entries().values() for key in entry["config"]})


def test_a_layer_may_have_any_name_and_order_is_the_models() -> None:
    names = [layer.name for layer in model_layers("llama-3.1-8b").layers]
    assert names.index("model.layers.2.self_attn") < names.index("model.layers.10.self_attn")


@given(st.sampled_from(catalogue()), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_a_real_config_with_damaged_values_gives_layers_or_one_of_our_errors(
    name: str, damage: dict[str, object]
) -> None:
    try:
        model = model_layers({**entries()[name]["config"], **damage})
    except KvstowError:
        return
    assert all(layer.page_bytes > 0 for layer in model.layers)


def test_full_and_window_layers_of_a_model_keep_the_same_pages() -> None:
    model = model_layers("gpt-oss-20b")
    pages = {(layer.retention, layer.page_bytes) for layer in model.layers}
    assert pages == {(Full(), 32_768), (Window(128), 32_768)}
