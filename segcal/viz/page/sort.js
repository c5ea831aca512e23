"use strict";
// Click or press Enter on a header to sort its column; again to reverse the order.
// Cells carry their number in data-value; texts come after numbers.
// The table of images, of which only a page is in the document, sorts itself.
for (const table of document.querySelectorAll("table.sortable:not(#image-table)")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    button.addEventListener("click", () => {
      const first = column ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const order = header.getAttribute("aria-sort") === first ? other : first;
      headers.forEach((each) => each.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", order);
      sortRows(table.tBodies[0], column, order === "ascending" ? 1 : -1);
    });
  });
}

function sortRows(body, column, sign) {
  const key = (row) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    if (typeof a.key !== typeof b.key) return typeof a.key === "number" ? -1 : 1;
    return sign * (typeof a.key === "number" ? a.key - b.key : a.key.localeCompare(b.key));
  };
  const rows = [...body.rows].map((row) => ({ row, key: key(row) }));
  rows.sort(compare);
  body.append(...rows.map((each) => each.row));
}

// Nothing can be opened on paper, so everything is opened before.
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((each) => (each.open = true));
});
