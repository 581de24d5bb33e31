// Browsers refuse workers to pages that are opened from a folder. There, a hidden frame runs the worker of the search.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${url}"></script>`
      this.inside = new Promise(resolve => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
          resolve(inside)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
