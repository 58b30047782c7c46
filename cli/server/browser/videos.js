// Samples frames of a video as the server does: evenly spaced, each with its timestamp. This is done here because images can be scaled to
// fit a request, however long the video is.

const MAX_FRAMES = 16, MIN_STEP_S = 1, MAX_PIXELS = 16 * 448 * 448; // frames; least seconds between two of them; pixels of all of them together
const QUALITY = 0.9, BEYOND_END_S = 1e7, SEEK_TIMEOUT_MS = 30000; // of JPEG; a timestamp beyond any video's end; milliseconds that a seek may take
const VIDEO_NAMES = /\.(mp4|m4v|mov|webm|mkv|avi|flv|mpe?g|ogv)$/i; // of files whose type a browser does not know

export function isVideo(file) {
  return file.type.startsWith("video/") || (!file.type && VIDEO_NAMES.test(file.name));
}

// [{ caption, picture }], a data URL each; `onProgress` is called with the frame number and the count. Throws an Error with a
// one-line message for the user.
export async function sampleFrames(file, onProgress) {
  const video = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: URL.createObjectURL(file) });
  const failure = new Error(`${file.name} cannot be decoded by this browser: convert it to MP4 or WebM`);
  try {
    await waitFor(video, "loadeddata", failure);
    if (!video.videoWidth) throw failure; // audio in a video container
    if (!Number.isFinite(video.duration)) await seek(video, BEYOND_END_S, failure); // as browsers record: its length is known at its end
    const length = video.duration, count = Math.min(MAX_FRAMES, Math.floor(length / MIN_STEP_S) + 1), frames = [];
    for (let index = 0; index < count; index += 1) {
      onProgress(index + 1, count);
      const second = index * length / count;
      if (second !== video.currentTime) await seek(video, second, failure);
      frames.push({ caption: `<${second.toFixed(1)} seconds>`, picture: drawFrame(video, MAX_PIXELS / count) });
    }
    return frames;
  } finally {
    URL.revokeObjectURL(video.src);
    video.removeAttribute("src");
  }
}

function seek(video, second, failure) {
  const done = waitFor(video, "seeked", failure);
  video.currentTime = second;
  return done;
}

function waitFor(video, event, failure) {
  return new Promise((resolve, reject) => {
    const timeout = setTimeout(() => reject(failure), SEEK_TIMEOUT_MS);
    video.addEventListener(event, () => { clearTimeout(timeout); resolve(); }, { once: true });
    video.addEventListener("error", () => { clearTimeout(timeout); reject(failure); }, { once: true });
  });
}

function drawFrame(video, maxPixels) {
  const scale = Math.min(1, Math.sqrt(maxPixels / (video.videoWidth * video.videoHeight))), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(video.videoWidth * scale));
  canvas.height = Math.max(1, Math.floor(video.videoHeight * scale));
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
