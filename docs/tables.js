// On a phone a row of a table with three columns or more is a card (site.css): each cell needs its heading.
document$.subscribe(() => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText.trim());
    if (heads.length < 3) continue;
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, i) => (cell.dataset.label = heads[i]));
    }
    table.dataset.stacked = "";
  }
});
