"""The gates against kernels that their authors had not seen."""

from dataclasses import replace

import pytest
import unseen

from snippets.precision import gate1, gate2
from snippets.precision.cases import OPS, adapt, generic, parse_inputs

CUSTOM = {
    "ln": ("x[R,H] w:weight[H] b[H]", unseen.ref_ln),
    "addnorm": ("x[R,H] res[R,H] w:weight[H]", unseen.ref_addnorm),
    "emb": ("t[V,H] i:int[R]<V", unseen.ref_emb),
}

# What only rounds wrongly, or only in a narrow dtype, is Gate 2's; everything else Gate 1 has to see.
GATE2 = {
    "w_rms_norm_trunc_store", "w_rms_norm_trunc_dx_only", "w_rms_norm_fp32_wide_mean_tail", "w_swiglu_trunc_store",
    "w_swiglu_trunc_grads_only", "w_rope_trunc_store", "w_cross_entropy_count_int32_of_rows",
}  # fmt: skip
# Wrong only under autocast, which the gates do not switch on: they judge one operator in one dtype.
BEYOND = {"w_rms_norm_autocast_matmul"}
# Right in training, and rejected all the same: a count divided in fp32 is off by an fp32 rounding in fp64, and a loss
# that loops over the rows gives a result of another dtype where there are none.
FALSE_ALARMS = {"g_cross_entropy_count_div", "g_causal_lm_loss_per_row"}


def operator(name):
    rest = name[2:]
    for op in sorted(OPS, key=len, reverse=True):
        if rest.startswith(op + "_"):
            return OPS[op]
    inputs, reference = CUSTOM[rest.partition("_")[0]]
    op = generic(parse_inputs(inputs), reference)
    reference, op, _ = adapt(op, reference)
    return replace(op, reference=reference)


def kernels(prefix):
    return sorted(n for n, k in vars(unseen).items() if n.startswith(prefix) and callable(k) and n not in BEYOND | FALSE_ALARMS)


@pytest.mark.parametrize("name", kernels("w_"))
def test_wrong_kernels_are_rejected(name):
    kernel, op = getattr(unseen, name), operator(name)
    if name in GATE2:
        assert not gate2.check(op, kernel, "cpu", structure=False).ok
    else:
        assert not gate1.check(op, kernel, "cpu").ok


@pytest.mark.parametrize("name", kernels("g_"))
def test_right_kernels_are_accepted(name):
    for gate in (gate1, gate2):
        verdict = gate.check(operator(name), getattr(unseen, name), "cpu")
        assert verdict.ok, verdict.failed[:2]
