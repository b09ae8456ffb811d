// Each part of a page (section.board): a table that is sorted and filtered, and charts of the rows it shows.
// Six rows at most are drawn in colour and named, at first the best of each family; the others are grey until
// they are pointed at.
const COLOURED = 6;
const ARROWS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
document.documentElement.classList.add("scripted");

// ---- sorting

function sortable(table) {
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const text = button.dataset.sort === "text";
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : text;
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[head.cellIndex];
        if (text) return cell.textContent.trim();
        return cell.dataset.value ? Number(cell.dataset.value) : null;
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null); // without a number: last
        return (text ? x.localeCompare(y) : x - y) * (up ? 1 : -1);
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(order));
    });
  }
}

// ---- pairs: the cell that is pointed at, touched or reached with the arrow keys is told below its table

function told(table) {
  const output = table.closest(".scroll").nextElementSibling;
  const cells = [...table.querySelectorAll("td[title]")];
  cells.forEach((cell, i) => (cell.tabIndex = i ? -1 : 0));
  for (const kind of ["pointerover", "focusin"]) {
    table.addEventListener(kind, (event) => (output.value = event.target.closest("td[title]")?.title ?? ""));
  }
  table.addEventListener("keydown", (event) => {
    const from = event.target.closest("td[title]");
    if (!from || !(event.key in ARROWS)) return;
    event.preventDefault();
    const [down, right] = ARROWS[event.key];
    let [row, column] = [from.parentElement, from.cellIndex];
    let next = null;
    do {
      if (down > 0) row = row.nextElementSibling;
      if (down < 0) row = row.previousElementSibling;
      column += right;
      next = row?.cells[column];
    } while (next && (next.hidden || row.hidden));
    if (!next?.title) return;
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

// ---- which rows are shown, drawn in colour and pointed at

class Board {
  constructor(section) {
    this.section = section;
    section.querySelectorAll("table.sortable").forEach(sortable);
    section.querySelectorAll("table.pairs").forEach(told);
    this.form = section.querySelector("form");
    this.rows = [...section.querySelectorAll("tr[data-family]")];
    this.coloured = []; // labels that are drawn in colour
    this.wished = null; // labels in the order in which they were asked for; null: the best of each family
    this.lit = null;
    this.charts = [...section.querySelectorAll(".chart")].map((holder) => new Chart(holder, this));
    this.form?.addEventListener("input", () => this.show());
    this.form?.addEventListener("reset", () => setTimeout(() => this.show()));
    this.form?.addEventListener("submit", (event) => event.preventDefault());
    section.addEventListener("change", (event) => {
      if (event.target.matches("input.drawn")) this.wish(event.target);
    });
    for (const kind of ["pointerover", "focusin"]) {
      section.addEventListener(kind, (event) => {
        const row = event.target.closest("[data-label]");
        if (!event.target.closest(".plot")) this.light(row ? row.dataset.label : null);
      });
    }
    this.show();
  }

  shown() {
    return this.rows.filter((row) => !row.hidden).map((row) => row.dataset.label);
  }

  passes(row) {
    if (row.dataset.role === "ablation" && !this.form.elements.ablations?.checked) return false;
    return [...new FormData(this.form)].every(([name, word]) => {
      if (!word || name === "ablations") return true;
      if (name === "label") return row.dataset.label.toLowerCase().includes(word.toLowerCase());
      return row.dataset[name].split("|").includes(word);
    });
  }

  show() {
    for (const row of this.rows) row.hidden = !this.passes(row);
    const labels = new Set(this.shown());
    for (const other of this.section.querySelectorAll("[data-label], [data-column]")) {
      const own = [other.dataset.label, other.dataset.column].filter((label) => label !== undefined);
      if (!this.rows.includes(other)) other.hidden = !own.every((label) => labels.has(label));
    }
    if (this.form) this.form.querySelector("output").value = `${labels.size} of ${this.rows.length} rows`;
    this.colour();
  }

  wish(box) {
    const label = box.closest("tr").dataset.label;
    const now = this.wished ?? this.coloured;
    this.wished = box.checked ? [...now, label].slice(-COLOURED) : now.filter((own) => own !== label);
    this.colour();
  }

  leaders() {
    // the best row of each family, then the next best
    const rows = this.rows.filter((row) => !row.hidden);
    const families = rows.map((row) => row.dataset.family);
    const first = rows.filter((row, i) => families.indexOf(row.dataset.family) === i);
    const labels = [...new Set([...first, ...rows])].slice(0, COLOURED);
    return rows.filter((row) => labels.includes(row)).map((row) => row.dataset.label);
  }

  colour() {
    const shown = this.shown();
    this.coloured = (this.wished ?? this.leaders()).filter((label) => shown.includes(label));
    for (const row of this.rows) {
      const box = row.querySelector("input.drawn");
      if (!box) continue;
      box.checked = this.coloured.includes(row.dataset.label);
      box.style.setProperty("--own", box.checked ? `var(--c${row.dataset.colour % COLOURED})` : "");
    }
    for (const chart of this.charts) chart.draw();
  }

  number(label) {
    // of its colour: the same in every figure of a report, also in those that matplotlib draws
    if (!this.coloured.includes(label)) return -1;
    return Number(this.rows.find((row) => row.dataset.label === label).dataset.colour);
  }

  light(label) {
    if (label === this.lit) return;
    this.lit = label;
    for (const other of this.section.querySelectorAll(".lit")) other.classList.remove("lit");
    if (label === null) return;
    for (const other of this.section.querySelectorAll("[data-label]")) {
      if (other.dataset.label === label) other.classList.add("lit");
    }
    for (const chart of this.charts) chart.raise(label);
  }
}

document.querySelectorAll("section.board").forEach((section) => new Board(section));
