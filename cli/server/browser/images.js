// Every request sends all images of its conversation, since the server is stateless. They are scaled down here to fit a request's limit.

const MAX_CHARACTERS = 28 << 20, MAX_PIXELS = 60e6; // of all images; the rest of a request's limit is for text
const QUALITY = 0.9, STEP = 0.8, MIN_SIDE = 64, EMPTY_LENGTH = 16; // of JPEG; scale per attempt; pixels of the longer side; characters

// Fits the images (data URLs) of these messages into one request. Those too large for their share are replaced in the messages, so that the
// next request sends the same bytes, which the server recognizes. Returns whether any was replaced.
export async function fit(messages) {
  const withImages = messages.filter((message) => message.pictures?.length);
  const all = await Promise.all(withImages.flatMap((message) => message.pictures).map(decodeImage));
  const totalOf = (of) => all.reduce((total, picture) => total + of(picture), 0);
  if (totalOf((picture) => picture.url.length) <= MAX_CHARACTERS && totalOf((picture) => picture.pixels) <= MAX_PIXELS) return false;
  // Sized as if there were two, four, eight of them: one more image does not change those before it.
  const shares = 2 ** Math.ceil(Math.log2(all.length));
  const urls = all.map((picture) => scaledDown(picture, MAX_CHARACTERS / shares, MAX_PIXELS / shares));
  for (const message of withImages) message.pictures = urls.splice(0, message.pictures.length);
  return true;
}

async function decodeImage(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    return { url, image: null, pixels: 0 }; // a format that this browser cannot decode: left to the server
  }
  return { url, image, pixels: image.naturalWidth * image.naturalHeight };
}

function scaledDown({ url, image, pixels }, maxCharacters, maxPixels) {
  if (!image || (url.length <= maxCharacters && pixels <= maxPixels)) return url;
  const longer = Math.max(image.naturalWidth, image.naturalHeight);
  let scale = Math.min(1, Math.sqrt(maxPixels / pixels)), encoded;
  do {
    encoded = drawScaled(image, scale);
    scale *= STEP;
  } while ((encoded.length > maxCharacters || encoded.length < EMPTY_LENGTH) && longer * scale >= MIN_SIDE); // a canvas may be too large for a browser
  return encoded;
}

function drawScaled(image, scale) {
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
