// Every request sends all images of its conversation, since the server is stateless: scaled down here where they would exceed a request's
// limit.

const REQUEST_CHARACTERS = 28 << 20, REQUEST_POINTS = 60e6; // of all images; the rest of a request's limit is for text
const QUALITY = 0.9, STEP = 0.8, LEAST = 64, EMPTY = 16; // of JPEG; scale per attempt; pixels of the longer side; characters

// Fits the images (data URLs) of these messages into one request. Those too large for their share are replaced in the messages, so that the
// next request sends the same bytes, which the server recognizes. Returns whether any was replaced.
export async function fit(messages) {
  const seeing = messages.filter((message) => message.pictures?.length);
  const all = await Promise.all(seeing.flatMap((message) => message.pictures).map(decoded));
  const sum = (of) => all.reduce((total, picture) => total + of(picture), 0);
  if (sum((picture) => picture.url.length) <= REQUEST_CHARACTERS && sum((picture) => picture.points) <= REQUEST_POINTS) return false;
  // Sized as if there were two, four, eight of them: one more image does not change those before it.
  const shares = 2 ** Math.ceil(Math.log2(all.length));
  const urls = all.map((picture) => smaller(picture, REQUEST_CHARACTERS / shares, REQUEST_POINTS / shares));
  for (const message of seeing) message.pictures = urls.splice(0, message.pictures.length);
  return true;
}

async function decoded(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    return { url, image: null, points: 0 }; // a format that this browser cannot decode: left to the server
  }
  return { url, image, points: image.naturalWidth * image.naturalHeight };
}

function smaller({ url, image, points }, characters, mostPoints) {
  if (!image || (url.length <= characters && points <= mostPoints)) return url;
  const longer = Math.max(image.naturalWidth, image.naturalHeight);
  let scale = Math.min(1, Math.sqrt(mostPoints / points)), made;
  do {
    made = drawn(image, scale);
    scale *= STEP;
  } while ((made.length > characters || made.length < EMPTY) && longer * scale >= LEAST); // a canvas may be too large for a browser
  return made;
}

function drawn(image, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.floor(image.naturalHeight * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
