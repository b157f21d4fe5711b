// Shows what is under the pointer at once; without this, browsers do so after a while.
for (const svg of document.querySelectorAll("svg[role=img]")) {
  const [title, text] = [svg.querySelector(":scope > title"), svg.querySelector(":scope > desc")];
  svg.setAttribute("aria-label", `${title.textContent}. ${text.textContent}`);
  svg.removeAttribute("aria-labelledby");
  title.remove();
  for (const mark of svg.querySelectorAll("title")) {
    mark.parentNode.dataset.tip = mark.textContent;
    mark.remove();
  }
}
const tip = document.body.appendChild(document.createElement("div"));
tip.id = "tip";
tip.hidden = true;
addEventListener("pointermove", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 10}px`;
});
