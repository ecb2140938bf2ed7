// One streamed answer over gRPC, with the definitions in proto/.
//   npm install && node grpc.mjs [127.0.0.1:50051]
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const root = fileURLToPath(new URL("../../proto", import.meta.url));
const definition = loader.loadSync("tandem/v1/inference.proto", { includeDirs: [root], keepCase: true, longs: String, enums: String });
const { InferenceService } = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new InferenceService(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());

const call = client.Generate({ text: "In the beginning", sampling: { max_tokens: 16 } });
let last;
for await (const response of call) {
  process.stdout.write(response.text);
  last = response;
}
console.log(`\n${last.finish_reason}, ${last.usage.num_output_tokens} tokens`);
client.close();
