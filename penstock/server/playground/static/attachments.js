// Images for the next message: chosen, pasted or dropped, with previews.

import { button, element } from "./element.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

const $ = (id) => document.getElementById(id);

export class Attachments {
  /** `getIsTaken`: whether the model takes images. */
  constructor({ getIsTaken }) {
    this.getIsTaken = getIsTaken;
    this.urls = [];
    this.list = $("attachments");
    this.note = $("attachments-note");
    $("attach").addEventListener("click", () => $("image-file").click());
    $("image-file").accept = TYPES.join();
    $("image-file").addEventListener("change", () => {
      this.add($("image-file").files);
      $("image-file").value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) this.add(event.clipboardData.files);
    });
    const area = $("chat");
    const isFiles = (event) => event.dataTransfer.types.includes("Files");
    area.addEventListener("dragover", (event) => {
      if (!isFiles(event)) return;
      event.preventDefault();
      area.classList.add("dropping");
    });
    area.addEventListener("dragleave", () => area.classList.remove("dropping"));
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!isFiles(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  async add(files) {
    this.note.textContent = "";
    if (!this.getIsTaken()) {
      this.note.textContent = "This model takes no images.";
      return;
    }
    for (const file of [...files]) { // the field's list is emptied meanwhile
      if (TYPES.includes(file.type)) this.urls.push(await readUrl(file));
      else this.note.textContent = `${file.name} is not an image that the server decodes.`;
    }
    this.show();
  }

  /** What is attached; nothing is afterwards. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.note.textContent = "";
    this.show();
    return urls;
  }

  put(urls) {
    this.urls = urls;
    this.show();
  }

  show() {
    this.list.hidden = !this.urls.length;
    this.list.replaceChildren(
      ...this.urls.map((url, index) => {
        const remove = () => {
          this.urls.splice(index, 1);
          this.show();
          $("prompt").focus();
        };
        const cross = button("×", remove, { "aria-label": `Remove image ${index + 1}` });
        return element("li", {}, element("img", { src: url, alt: `Image ${index + 1}` }), cross);
      }),
    );
  }
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
