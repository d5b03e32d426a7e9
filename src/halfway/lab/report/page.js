// Sorts the table by a column, filters rows and dots by words, and shows a dot's numbers beside it.
const rows = [...document.querySelectorAll("table.rows tbody tr")];
const points = [...document.querySelectorAll(".point")];
document.querySelectorAll("table.rows th button").forEach((button, column) => button.onclick = () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") === "descending";
  document.querySelectorAll("table.rows th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.cells[column].dataset.sort;
  rows.sort((a, b) => !value(a) - !value(b) || (up ? 1 : -1) * (value(a) - value(b)));
  rows.forEach(row => row.parentElement.append(row));
});
const filter = document.getElementById("filter");
filter.oninput = () => {
  const words = filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const fits = thing => words.every(word => thing.dataset.label.toLowerCase().includes(word));
  rows.forEach(row => row.hidden = !fits(row));
  points.forEach(point => point.classList.toggle("dim", !fits(point)));
  document.getElementById("count").textContent = words.length ? `${rows.filter(fits).length} of ${rows.length} rows` : "";
};
const tip = document.querySelector(".tip");
points.forEach(point => {
  const title = point.querySelector("title"), text = title.textContent;
  point.setAttribute("aria-label", text);
  title.remove();  // the browser's own hint would come on top
  const show = () => {
    tip.textContent = text;
    tip.style.top = `calc(${point.dataset.y} + 14px)`;
    const right = parseFloat(point.dataset.x) > 50;
    tip.style.left = right ? "auto" : point.dataset.x;
    tip.style.right = right ? `calc(100% - ${point.dataset.x})` : "auto";
    tip.hidden = false;
  };
  const hide = () => { tip.hidden = true; };
  point.onpointerenter = point.onfocus = show;
  point.onpointerleave = point.onblur = hide;
});
