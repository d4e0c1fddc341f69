"use strict";
// The page is complete without this: it only offers the embedded data as a file and opens tables for printing.
const button = document.getElementById("download");
button.hidden = false;
button.addEventListener("click", () => {
  const data = document.getElementById("data").textContent;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  link.download = button.dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
addEventListener("beforeprint", () => {
  for (const box of document.querySelectorAll("details")) box.open = true;
});
