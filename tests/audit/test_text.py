"""The sentences of an audit claim no more than is known."""

from audit_evidence import made_up, profile

from mmlda.audit.checks import Check, all_checks, recognised
from mmlda.audit.text import attack_name, close_call, describe, notes, summary
from mmlda.audit.trials import CE, MARGIN, Settings, Trial, plans
from mmlda.audit.verdict import decide


def said(*args, **kwargs):
    e = made_up(*args, **kwargs)
    checks = all_checks(e)
    return summary(e, checks, decide(checks, constant=e.profile.constant), recognised(e))


def test_masked_says_that_the_rest_is_unknown_where_it_is():
    # chance is 10 of 100. What no gradient reaches may be robust or not, once it is more than a constant answer has
    for left, proven in ((88, 0), (88, 15), (11, 0)):
        text = said(98, left, proven)
        assert text.startswith("Masked at eps = 0.1: ") and "not robust" not in text
        assert text.endswith("; no gradient reaches the rest. Whether the rest is robust cannot be told.")
    assert said(98, 10, 0).endswith("together 10%; no gradient reaches the rest. It is not robust.")
    assert said(98, 0, 0).endswith("together 0%. It is not robust.")
    assert said(98, 15, 15).endswith("Whether the rest is robust cannot be told on so few images (100).")


def test_none_says_that_few_images_show_little():
    assert said(15, 15, 15).endswith("has 10%). Not shown to be robust on so few images (100).")
    assert said(8, 8, 8, n=20).startswith("Real")
    assert said(4, 4, 4, n=20).endswith("Not shown to be robust on so few images (20).")
    assert said(10, 10, 10).endswith("has 10%). Not robust, and the gradient shows it.")
    assert said(0, 0, 0).endswith("together 0%. Not robust, and the gradient shows it.")


def test_mixed_names_the_checks_that_failed():
    text = said(60, 60, 60, more_steps=10)
    assert text.endswith("; not all of it is shown to be robustness. Failed: more steps.")


def test_masks_end_the_sentence():
    assert said(0, 0, 0, random=True, trials=[("BIM", CE, 0, "white", {"view": "averaged"})]).endswith(
        "the gradient shows it. Its answers are random, which hides nothing here."
    )
    straight = [("BIM", loss, 0, "white", {"view": "straight-through"}) for loss in (CE, MARGIN)]
    assert said(90, 0, 0, steps=("floor", "round"), trials=straight).endswith(
        "It is not robust. It has steps without a gradient (floor, round)."
    )
    assert said(3, 0, 0, output="sigmoids").endswith(
        "It returns what looks like sigmoids, which hides next to nothing here."
    )
    assert said(90, 0, 0, numbers={"zero_gradient": 1.0}).endswith("Its softmax is saturated.")


def test_a_close_call_names_the_distance_to_the_limit():
    near = Check(name="hidden", measured=0.08, limit=0.05, passed=True, count=8, of=100)
    assert close_call([near]) == "Close call: hidden is 8 of 100, 2 images from the limit of 5%."
    cosine = Check(name="averaging", measured=0.48, limit=0.5, passed=False)
    assert close_call([near, cosine]).endswith("limit of 5%; averaging is 0.48, its limit 0.5.")
    assert close_call([]) == ""


def test_every_check_is_a_sentence():
    e = made_up(60, 50, 40)
    for check in all_checks(e):
        assert describe(check, e).endswith(".")
    assert "20.0% of the images count as robust" in describe(all_checks(e)[0], e)


def test_notes_say_which_images_were_attacked():
    assert notes(profile(60), "digits", 360, 10) == ("60 of 360 images of digits, of 10 classes.",)
    assert notes(profile(20), "", 360, 10) == ("20 of 360 images, of 10 classes.", "Only 20 images.")
    assert notes(profile(100), "digits", 100, 10) == ()
    assert notes(profile(100, no_float64="why"), "", 100, 10) == ("No float64 copy of the network (why).",)


def test_attacks_have_different_names():
    extras = ("float64", "features", "straight-through", "averaged", "surrogate")
    for own in ("logits", "probabilities"):
        names = [(attack_name(plan), plan.surface, plan.eps) for plan in plans(Settings(eps=0.1), own, extras)]
        assert len(set(names)) == len(names)
    plan = Trial(attack="BIM", loss=CE, surface="logits", eps=0.1, kind="standard", steps=40)
    assert attack_name(plan) == "BIM, cross-entropy, 40 steps"
