"""Accuracy as an ``evaluate`` module, for machines that cannot fetch the hub's own."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their reference."""

    def _info(self):
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions and references: lists of class numbers",
            features=datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}),
        )

    def _compute(self, predictions, references):
        hits = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
        return {"accuracy": hits / len(references)}
