// Overlays: the images that were drawn.

function overlayOf(name, model) {
  const found = [...document.querySelectorAll("[data-overlay]")].filter(
    (each) => each.dataset.overlay === name
  );
  return found.find((each) => Number(each.dataset.model) === model) || found[0];
}

const hasOverlay = (name) => overlayOf(name) !== undefined;

function openOverlay(name, model) {
  const figure = overlayOf(name, model);
  for (let at = figure; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  figure.scrollIntoView({ block: "start" });
  figure.focus({ preventScroll: true });
}
