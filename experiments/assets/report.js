// Shows the layers of the token under the pointer, or of the one that the address names (#token-12).
const widths = JSON.parse(document.getElementById("widths").textContent);
const panel = document.getElementById("layers");

function bars(kind, shares, y) {
  const step = 900 / shares.length;
  const rects = shares.map((share, layer) => {
    const height = 50 * share;
    return `<rect class="${kind}" x="${70 + layer * step}" y="${y + 50 - height}" width="${step * 0.8}" height="${height}">` +
      `<title>layer ${layer + 1}: ${Math.round(100 * share)}%</title></rect>`;
  });
  return `<text x="0" y="${y + 30}">${kind}</text>` + rects.join("");
}

function show(index) {
  document.querySelectorAll(".shown").forEach((token) => token.classList.remove("shown"));
  document.getElementById(`token-${index}`).classList.add("shown");
  const name = document.createElement("b");
  name.textContent = widths.tokens[index];
  panel.innerHTML = `<span></span>, token ${index}: share of groups run in layers 1 to ${widths.ffn[index].length}` +
    `<svg viewBox="0 0 980 120" width="100%" height="120">${bars("attention", widths.attention[index], 5)}` +
    `${bars("ffn", widths.ffn[index], 65)}</svg>`;
  panel.firstChild.replaceWith(name);
}

if (widths) {
  document.getElementById("text").addEventListener("mouseover", (event) => {
    if (event.target.classList.contains("token")) show(Number(event.target.id.slice("token-".length)));
  });
  const named = location.hash.match(/^#token-(\d+)$/);
  if (named && Number(named[1]) < widths.tokens.length) show(Number(named[1]));
}
