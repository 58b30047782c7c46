// Samples frames of a video as the server does: spread evenly, each with its timestamp. They are taken here, so that a request carries
// images, which are scaled to fit it however long the video is.

const MOST = 16, STEP = 1, POINTS = 16 * 448 * 448; // frames; least seconds between two of them; pixels of all of them together
const QUALITY = 0.9, BEYOND = 1e7, LATE = 30000; // of JPEG; a timestamp beyond any video's end; milliseconds that a seek may take
const NAMES = /\.(mp4|m4v|mov|webm|mkv|avi|flv|mpe?g|ogv)$/i; // of files whose type a browser does not know

export function isVideo(file) {
  return file.type.startsWith("video/") || (!file.type && NAMES.test(file.name));
}

// [{ caption, picture }], a data URL each; `tell` is called with the frame number and the count. Throws an Error with a
// one-line message for the user.
export async function moments(file, tell) {
  const video = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: URL.createObjectURL(file) });
  const unread = new Error(`${file.name} cannot be decoded by this browser: convert it to MP4 or WebM`);
  try {
    await happened(video, "loadeddata", unread);
    if (!video.videoWidth) throw unread; // audio in a video container
    if (!Number.isFinite(video.duration)) await sought(video, BEYOND, unread); // as browsers record: its length is known at its end
    const length = video.duration, count = Math.min(MOST, Math.floor(length / STEP) + 1), found = [];
    for (let number = 0; number < count; number += 1) {
      tell(number + 1, count);
      const second = number * length / count;
      if (second !== video.currentTime) await sought(video, second, unread);
      found.push({ caption: `<${second.toFixed(1)} seconds>`, picture: drawn(video, POINTS / count) });
    }
    return found;
  } finally {
    URL.revokeObjectURL(video.src);
    video.removeAttribute("src");
  }
}

function sought(video, second, unread) {
  const seeked = happened(video, "seeked", unread);
  video.currentTime = second;
  return seeked;
}

function happened(video, event, unread) {
  return new Promise((resolve, reject) => {
    const late = setTimeout(() => reject(unread), LATE);
    video.addEventListener(event, () => { clearTimeout(late); resolve(); }, { once: true });
    video.addEventListener("error", () => { clearTimeout(late); reject(unread); }, { once: true });
  });
}

function drawn(video, points) {
  const scale = Math.min(1, Math.sqrt(points / (video.videoWidth * video.videoHeight))), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(video.videoWidth * scale));
  canvas.height = Math.max(1, Math.floor(video.videoHeight * scale));
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
