// Numbers as words, and elements without markup: what users wrote is only ever set as text.

function formatNumber(value, digits = 6) {
  if (!Number.isFinite(value)) return "none";
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
}

function formatAmount(value, unit, digits = 6) {
  return `${formatNumber(value, digits)} ${unit}`;
}

function formatShare(value, digits = 2) {
  return `${(100 * value).toFixed(digits)} %`;
}

// An element with attributes and children. "on…" attributes are listeners, "class" and the like are set as given.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
