"""Recurrent states: page sizes by kind, each against arithmetic written out here."""

from kvstow.plan.models import recurrent
from kvstow.plan.models.precision import Recurrence
from kvstow.plan.models.ranks import TensorRank
from kvstow.plan.retention import State
from kvstow.plan.spec import DType

WHOLE = Recurrence(
    rank=TensorRank(),
    conv_dtype=DType.BFLOAT16,
    state_dtype=DType.BFLOAT16,
)


def test_mamba1_keeps_a_state_and_three_inputs_per_channel() -> None:
    spec = recurrent.mamba1("s", WHOLE, channels=8192, state=16, kernel=4)
    assert spec.page_bytes == 8192 * 16 * 2 + 8192 * 3 * 2 == 311_296


def test_mamba2_keeps_a_matrix_per_head_and_convolves_x_b_and_c() -> None:
    spec = recurrent.mamba2("s", WHOLE, heads=24, head_dim=64, groups=1, state=128, kernel=4)
    assert spec.page_bytes == 24 * 64 * 128 * 2 + (24 * 64 + 2 * 128) * 3 * 2 == 403_968


def test_a_gated_delta_net_has_the_published_state_page() -> None:
    spec = recurrent.gated_delta_net(
        "s", WHOLE, key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4
    )
    assert spec.page_bytes == 32 * 128 * 128 * 2 + 3 * 8192 * 2 == 1_097_728


def test_lightning_attention_keeps_a_square_per_head() -> None:
    spec = recurrent.linear_attention("s", WHOLE, heads=64, head_dim=128)
    assert spec.page_bytes == 64 * 128 * 128 * 2


def test_a_short_convolution_keeps_its_last_inputs() -> None:
    spec = recurrent.short_convolution("s", WHOLE, channels=1024, kernel=3)
    assert spec.page_bytes == 1024 * 2 * 2


def test_states_may_be_wider_than_convolutions() -> None:
    wide = Recurrence(
        rank=TensorRank(),
        conv_dtype=DType.BFLOAT16,
        state_dtype=DType.FLOAT32,
    )
    spec = recurrent.mamba1("s", wide, channels=8, state=4, kernel=4)
    assert spec.field("conv").nbytes == 8 * 3 * 2
    assert spec.field("ssm").nbytes == 8 * 4 * 4


def test_a_recurrent_layer_is_one_state_of_one_head() -> None:
    spec = recurrent.linear_attention("s", WHOLE, heads=2, head_dim=2)
    assert (spec.retention, spec.states, spec.heads.size) == (State(), 1, 1)
    assert spec.block_tokens == 512
