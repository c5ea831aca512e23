"""Reports straight from a source of predictions."""

from segcal.evaluation.evaluate import measure


def reports(source, calibrators=None, *, resamples=1000, **options):
    """The report after each calibrator, by its name; by default of the predictions as they are."""
    measured = measure(source, calibrators or {"none": None}, per_image=resamples > 0, **options)
    return {name: found.report(resamples=resamples) for name, found in measured.items()}
