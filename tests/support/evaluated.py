"""Reports straight from a source of predictions."""

from segcal.evaluation.evaluate import measure, report_of


def reports(source, calibrators=None, *, resamples=1000, protocols=(), **options):
    """The report after each calibrator, by its name; by default of the predictions as they are."""
    measured = measure(
        source,
        calibrators or {"none": None},
        per_image=resamples > 0,
        protocols=protocols,
        **options,
    )
    return {
        name: report_of(found, protocols, resamples=resamples) for name, found in measured.items()
    }
