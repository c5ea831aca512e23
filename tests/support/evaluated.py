"""Reports straight from a source of predictions."""

from segcal.evaluation.measure import measure


def reports(source, calibrators=None, **options):
    """The report after each calibrator, by its name; by default of the predictions as they are."""
    measured = measure(source, calibrators or {"none": None}, **options)
    return {name: found.report for name, found in measured.items()}
