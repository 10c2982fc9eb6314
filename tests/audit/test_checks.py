"""The arithmetic of the checks, on evidence made by hand."""

import pytest
from audit_evidence import first, made_up

from mmlda.audit.checks import Check, above, all_checks, first_above, recognised
from mmlda.audit.trials import CE, MARGIN
from mmlda.results import wilson


def checks(*args, **kwargs):
    return {check.name: check for check in all_checks(made_up(*args, **kwargs))}


@pytest.mark.parametrize(("of", "limit"), [(100, 0.05), (200, 0.05), (57, 0.13), (100, 0.01), (3, 0.9)])
def test_the_first_count_above_a_limit_is_found(of, limit):
    expected = next((count for count in range(of + 1) if wilson(count, of)[0] > limit), of + 1)
    assert first_above(of, limit) == expected
    assert all(above(count, of, limit) == (count >= expected) for count in range(of + 1))


def test_margin_is_the_number_of_images_to_the_other_side():
    for count in range(101):
        check = Check(name="hidden", limit=0.05, count=count, of=100)
        more = [k for k in range(101) if above(k, 100, 0.05) != above(count, 100, 0.05)]
        assert check.margin == min(abs(k - count) for k in more)
    assert Check(name="hidden", limit=0.9, count=1, of=2).margin is None  # not even both images are above
    assert Check(name="zero gradients", limit=0.05, count=0, of=0).margin is None
    assert Check(name="tiny gradients", measured=0.5).margin is None


def test_a_check_is_near_its_limit_within_one_standard_error():
    def near(count, of=100, limit=0.05):
        return Check(name="hidden", limit=limit, count=count, of=of).near

    assert [count for count in range(101) if near(count)] == [7, 8, 9, 10, 11, 12]
    assert [count for count in range(101) if near(count, limit=0.15)] == list(range(18, 26))
    assert not near(0, of=50, limit=0.01)  # no image at all, though two would be above the limit
    assert Check(name="averaging", measured=0.48, limit=0.5).near
    assert not Check(name="averaging", measured=0.4, limit=0.5).near
    assert not Check(name="gaps", measured=7.0).near


def test_flipping_a_check_changes_sides_and_back():
    check = checks(60, 51, 51)["hidden"]
    assert (check.passed, check.flipped().passed) == (True, False)
    assert check.flipped().flipped() == check
    survivors = checks(9, 9, 9)["survivors"]
    assert (survivors.passed, survivors.flipped().passed) == (None, True)


def test_shares_and_counts_of_images():
    found = checks(60, 50, 40, square=45, more_steps=7)
    assert found["hidden"].measured == 0.2 and found["hidden"].count == 20  # 60 standard, 40 proven
    assert found["survivors"].measured == 0.4 and found["survivors"].limit == 0.1
    assert found["losses"].count == 10  # the margin leaves 50 of 60
    assert found["float64"].count == 10
    assert found["surface"].measured == pytest.approx(0.4)  # 100 on probabilities, 60 on logits
    assert found["black box"].count == 5
    assert found["more steps"].count == 7
    assert found["transfer"].passed is None and found["transfer"].count is None
    assert all(0 <= check.measured <= 1 for check in found.values() if check.limit is not None)


def test_limits_are_passed_at_the_first_count_above():
    assert checks(60, 51, 51)["hidden"].passed is True and checks(60, 50, 50)["hidden"].passed is False
    assert checks(60, 60, 60, more_steps=9)["more steps"].passed is True
    assert checks(60, 60, 60, more_steps=10)["more steps"].passed is False
    for count, passed in ((9, True), (10, False)):
        assert checks(0, 0, 0, numbers={"zero_gradient": count / 100})["zero gradients"].passed is passed
    assert checks(0, 0, 0, right=0)["zero gradients"].passed is True  # no image is right


def test_attacks_of_more_steps_are_compared_whatever_their_order():
    fewer = ("BIM", CE, 70, "standard", {"steps": 5})  # comes last, and leaves more than FGSM
    found = checks(60, 60, 60, trials=[fewer])["more steps"]
    assert found.count == 10 and found.passed is False


def test_kinds_that_are_recognised_do_not_pass():
    straight = [("BIM", loss, 30, "white", {"view": "straight-through"}) for loss in (CE, MARGIN)]
    for changes, trials, name in (
        ({"output": "probabilities"}, (), "output"),
        ({"output": "sigmoids"}, (), "output"),
        ({"steps": ("round",)}, straight, "rounding"),
        ({"numbers": {"no_gradient": 0.5}}, (), "rounding"),
    ):
        surface = "probabilities" if changes.get("output") == "probabilities" else "logits"
        more = [("APGD", CE, 60, "standard", {"surface": surface, "view": "float64"}), *trials]
        assert checks(60, 30, 30, trials=more, **changes)[name].passed is not True
    assert checks(60, 30, 30, steps=("round",), trials=straight)["rounding"].count == 30
    assert checks(60, 30, 30)["rounding"].passed is True and checks(60, 30, 30)["output"].passed is True


def test_random_networks_have_no_limit_on_float64_and_one_on_averaging():
    averaged = [("BIM", loss, 40, "white", {"view": "averaged"}) for loss in (CE, MARGIN)]
    for cosine, passed in ((0.5, True), (0.49, False)):
        found = checks(60, 40, 40, random=True, numbers={"agreement": cosine}, trials=averaged)
        assert found["averaging"].passed is passed and found["averaging"].measured == cosine
        assert found["float64"].limit is None and found["float64"].measured == 0.2
        assert found["randomness"].count == 20
    assert "averaging" not in checks(60, 40, 40)


def test_masks_are_recognised():
    def kinds(**changes):
        return recognised(made_up(60, 50, 50, **changes))

    assert kinds() == ()
    assert kinds(output="probabilities", random=True) == ("probabilities", "random")
    assert kinds(numbers={"zero_gradient": 1.0}) == ("saturated",)
    everywhere = dict.fromkeys(("zero_gradient", "zero_gradient_margin", "no_gradient"), 1.0)
    assert kinds(numbers=everywhere) == ("no gradient",) and kinds(numbers=everywhere, constant=True) == ()
    assert kinds(numbers={**everywhere, "gaps_above_104": 0.9}) == ("saturated", "no gradient")
    assert kinds(numbers={"zero_gradient": 0.09, "gaps_above_104": 0.9}) == ()


def test_images_are_held_by_kind_within_eps():
    e = made_up(60, 50, 40)
    assert e.right.all() and e.standard.equal(first(60)) and e.left.equal(first(50))
    assert e.proven.equal(first(40)) and e.hidden.equal(first(60) & ~first(40))
