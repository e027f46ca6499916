import Foundation
import XCTest

@testable import Runner

/// What the interpreter gave. `RUNNER_FOLDER` names the folder that was built, that of sizes, or the package of
/// a plain model.
final class RunnerTests: XCTestCase {
    struct Fixture: Decodable {
        /// Of a model that writes: a prompt, and the likeliest tokens after it.
        let prompt: [Int32]
        let written: [Int32]
        /// Of a plain model: one call. Of a folder of sizes: one at each size, and one that is filled up.
        let calls: [Call]
    }

    struct Call: Decodable {
        let inputs: [String: Numbers]
        let outputs: [String: Numbers]
    }

    func fixture() throws -> (place: URL, fixture: Fixture) {
        guard let place = ProcessInfo.processInfo.environment["RUNNER_FOLDER"] else {
            throw XCTSkip("set RUNNER_FOLDER to the folder or the package that this was written for")
        }
        let url = try XCTUnwrap(Bundle.module.url(forResource: "fixture", withExtension: "json"))
        let fixture = try JSONDecoder().decode(Fixture.self, from: Data(contentsOf: url))
        return (URL(fileURLWithPath: place), fixture)
    }

    func testWritesWhatTheInterpreterWrites() async throws {
        let (place, fixture) = try fixture()
        if fixture.prompt.isEmpty { throw XCTSkip("a plain model") }
        let runner = try await Runner(place)
        var written: [Int32] = []
        for try await token in runner.generate(fixture.prompt, steps: fixture.written.count) {
            written.append(token)
        }
        XCTAssertEqual(written, fixture.written)
    }

    func testGivesWhatTheInterpreterGives() async throws {
        let (place, fixture) = try fixture()
        if fixture.calls.isEmpty { throw XCTSkip("a model that writes") }
        if place.pathExtension == "mlpackage" {
            let model = try await PlainModel(place)
            for call in fixture.calls { check(try await model.predict(call.inputs), call.outputs) }
        } else {
            let model = try SizedModel(place)
            for call in fixture.calls { check(try await model.predict(call.inputs), call.outputs) }
        }
    }

    func check(_ outputs: [String: Numbers], _ expected: [String: Numbers]) {
        for (name, numbers) in expected {
            XCTAssertEqual(outputs[name]?.shape, numbers.shape, name)
            let range = (numbers.values.max() ?? 0) - (numbers.values.min() ?? 0)
            for (value, wanted) in zip(outputs[name]?.values ?? [], numbers.values) {
                XCTAssertEqual(value, wanted, accuracy: 0.02 * range + 1e-6, name)
            }
        }
    }
}
