"""What the page's abbreviations mean: defined where they first appear, and again in the glossary."""

from __future__ import annotations

import html
import re

TERMS = {
    "SR": "softmax regression, the ordinary network: a linear layer trained with the cross-entropy",
    "MM-LDA": "Max-Mahalanobis linear discriminant analysis, the paper’s network: fixed, evenly spread class means",
    "SAT": "specific adversarial training: the network is fine-tuned on one attack at one perturbation",
    "HAT": "hybrid adversarial training: like SAT, with perturbations drawn from 0.02 to 0.20",
    "ε": "size of the perturbation: the most that a pixel may change, where pixels range from 0 to 1",
    "FGSM": "fast gradient sign method: one step along the sign of the gradient",
    "BIM": "basic iterative method: FGSM in several small steps",
    "ILCM": "iterative least-likely class method: BIM towards the class that the network considers least likely",
    "JSMA": "Jacobian-based saliency map attack: changes the few pixels that matter most",
    "C&W": "Carlini and Wagner’s attack: searches for the smallest change that is misclassified",
    "PGD": "projected gradient descent: BIM from a random start",
    "APGD": "PGD that adapts its step size",
    "DLR": "difference of logits ratio: a loss that does not depend on the scale of the logits",
    "Square": "a black-box attack: random square changes, no gradients",
    "worst case": "the strongest of several attacks, image by image",
    "standard attacks": "FGSM, BIM, PGD and APGD on the cross-entropy, as papers usually report",
    "centre loss": "MM-LDA trained with all of Appendix B.1’s objective, which also pulls features to their class mean",
    "C = 10000": "MM-LDA whose class means have the squared norm 10000 instead of 100",
    "MMD": "max-Mahalanobis distribution: one Gaussian per class, the means as far apart as possible",
    "BP1": "class-biased data: each class keeps a different share of its images, 10% to 100%",
    "BP2": "class-biased data: one class keeps all of its images, each other class 20%",
    "silhouette": "how well classes are separated, from −1 to 1",
    "NLL": "negative log-likelihood of the true class; lower is better",
    "ECE": "expected calibration error: the gap between confidence and accuracy",
}


class Glossary:
    """The terms that one page has used so far."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def define(self, markup: str) -> list[tuple[str, str]]:
        """The terms that appear here for the first time on the page, with their definitions.

        >>> Glossary().define("<b>SR</b> under BIM")[1]
        ('BIM', 'basic iterative method: FGSM in several small steps')
        """
        text = html.unescape(re.sub(r"<[^>]*>", " ", markup)).replace("\u2011", "-")
        found = [
            term for term in TERMS if term not in self.used and re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text)
        ]
        self.used.update(found)
        return [(term, TERMS[term]) for term in found]

    def all(self) -> list[tuple[str, str]]:
        """Every term that the page has used, in alphabetical order."""
        return sorted(((term, TERMS[term]) for term in self.used), key=lambda item: item[0].lower())
