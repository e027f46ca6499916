import Foundation

/// What `runner.json` says of a model that writes.
public struct RunnerFile: Decodable {
    public struct Port: Decodable {
        public let shape: [Int]
        public let dtype: String
    }

    public struct Function: Decodable {
        public let inputs: [String: Port]
        public let outputs: [String: Port]
        public let states: [String: Port]
        /// The function that makes other inputs of this one, from the position and perhaps the tokens, or "".
        public let inputsFrom: String
        /// The packages that hold it, by number.
        public let chunks: [Int]
        /// The most tokens that it reads, those of the call among them; those of the whole where it is not said.
        public let context: Int?
        /// The input with a 1 at the place of the token whose logits are given, or "" where those of all are.
        public let picks: String
        /// The compute units, as Core ML calls them.
        public let units: String

        enum CodingKeys: String, CodingKey {
            case inputs, outputs, states, units, context, picks, chunks
            case inputsFrom = "inputs_from"
        }
    }

    public let format: String
    public let version: Int
    public let chunks: [String]
    public let functions: [String: Function]
    public let tokens: String
    public let logits: String
    /// The logits of the tokens that `logits` holds then, one for each part of the vocabulary, or "".
    public let values: String
    public let context: Int
    public let ends: [Int]
    public let sampling: [String: Double]

    /// The tokens that a function reads, or the one that makes its inputs.
    public func port(of function: Function) -> Port? {
        function.inputs[tokens] ?? functions[function.inputsFrom]?.inputs[tokens]
    }

    /// Read the `runner.json` of a folder.
    public static func read(_ folder: URL) throws -> RunnerFile {
        let data = try Data(contentsOf: folder.appendingPathComponent("runner.json"))
        let file = try JSONDecoder().decode(RunnerFile.self, from: data)
        guard file.format == "anesurgery runner", file.version == 3 else {
            throw RunnerError.version(file.version)
        }
        return file
    }
}

public enum RunnerError: Error {
    case version(Int)
    case missing(String)
    case tooLong(tokens: Int, context: Int)
    case empty
}
